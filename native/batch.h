// The rows of one step, and what must hold for them before a kernel sees them.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "sample.h"

namespace loadproof {

struct PlanConfig {
  std::string isa;
  int num_threads;
  int hidden_size, vocab_size;
  int max_num_batched_tokens, max_num_seqs, max_model_len;
  int block_size, num_blocks;
  LogprobsMode logprobs_mode;
  bool keeps_hidden;  // a final hidden state for every position of the cache, not only for a step's rows
};

// One step's rows; every span is borrowed for the call. Lengths are checked, values too.
struct Batch {
  std::span<const std::int32_t> token_ids;     // [T]
  std::span<const std::int32_t> query_starts;  // [S + 1]
  std::span<const std::int32_t> seq_lens;      // [S]
  std::span<const std::int32_t> block_tables;  // [S * max_blocks]
  std::span<const std::int32_t> logits_rows;   // [R]
  int max_blocks;
  // Scored positions; their hidden states were computed in an earlier step or are in this one.
  std::span<const std::int32_t> hidden_rows;    // [N] block * block_size + offset, or rows of T
  std::span<const std::int32_t> score_targets;  // [N] the token whose log-probability is wanted
  std::span<const std::int32_t> score_tops;     // [N] how many of the best tokens' besides

  bool scores() const { return !hidden_rows.empty(); }
};

// Throws std::invalid_argument for what is wrong with a user's input.
inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Final hidden states that a plan has room for.
std::size_t num_hidden_rows(const PlanConfig& config);

// Throws std::invalid_argument for sizes that no plan can have.
void check_config(const PlanConfig& config);

// Throws std::invalid_argument for a batch that does not fit the plan: every index that a kernel follows is
// checked here.
void check_batch(const PlanConfig& config, const Batch& batch);
void check_scores(const PlanConfig& config, const Batch& batch);
void check_sampling(const PlanConfig& config, const Batch& batch, std::span<const SampleParams> params);

}  // namespace loadproof
