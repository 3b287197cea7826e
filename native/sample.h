// Sampling one row: the token at position t is a pure function of the row's logits, the request's
// parameters and (seed, t).
#pragma once

#include <cstddef>
#include <cstdint>

namespace loadproof {

// What log-probabilities are of: the logits as they come, or what is sampled from: penalised, biased, divided
// by the temperature, with the tokens that cannot be drawn at minus infinity. Or they are those logits.
enum class LogprobsMode { kRawLogprobs, kRawLogits, kProcessedLogprobs, kProcessedLogits };

// Parameters of one row; pointers are borrowed for the call. Whoever fills this in has checked it: the
// temperature is finite and at least 0, the repetition penalty above 0, every id within the vocabulary.
struct SampleParams {
  float temperature;         // 0 (below 1e-5, as in vLLM): greedy
  std::int32_t top_k;        // 0: all
  float top_p;               // 1: all
  float min_p;               // 0: all
  float repetition_penalty;  // 1: off; over prompt and output tokens
  float presence_penalty;    // 0: off; over output tokens
  float frequency_penalty;   // 0: off; over output tokens
  std::uint64_t seed;
  std::int64_t position;        // absolute position of the token being sampled: the counter
  const std::int32_t* history;  // [num_history]: prompt tokens, then output tokens
  std::int32_t num_history;
  std::int32_t num_prompt;
  const std::int32_t* bias_ids;  // [num_bias]
  const float* bias_values;      // [num_bias]; minus infinity bans a token
  std::int32_t num_bias;
  std::int32_t num_logprobs;  // -1: none; at most the vocabulary
  LogprobsMode logprobs_mode;
};

// What one row gives; the two arrays are the caller's, [max(num_logprobs, 0)], most likely first. Without
// log-probabilities only the token is written.
struct SampleResult {
  std::int32_t token;
  float token_logprob;
  std::int32_t token_rank;
  std::int32_t* top_ids;
  float* top_logprobs;
};

// A thread's scratch, owned by the plan; its contents mean nothing between calls.
struct SampleScratch {
  float* floats;        // [num_floats(vocab_size)]
  std::uint64_t* keys;  // [num_keys(vocab_size)]

  // Two rows (adjusted logits, weights) and 33 floats for each block of 256 tokens.
  static constexpr std::size_t num_floats(std::size_t vocab_size) {
    return 2 * vocab_size + 33 * ((vocab_size + 255) / 256);
  }
  // Two arrays of every token's sort key.
  static constexpr std::size_t num_keys(std::size_t vocab_size) { return 2 * ((vocab_size + 15) / 16 * 16); }
};

}  // namespace loadproof
