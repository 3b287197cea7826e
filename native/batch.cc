#include "batch.h"

#include <algorithm>
#include <cstddef>

#include "kernels.h"

namespace loadproof {
namespace {

std::size_t size(int x) { return static_cast<std::size_t>(x); }

}  // namespace

void check_config(const PlanConfig& config) {
  // Products of two such sizes stay far below 2**63, positions are exact as floats, and no int overflows.
  constexpr int kMost = 1 << 24, kWidest = 1 << 20;
  require(config.vocab_size <= kMost && config.max_model_len <= kMost &&
              config.max_num_batched_tokens <= kMost && config.max_num_seqs <= kMost,
          "vocab_size, max_model_len, max_num_batched_tokens and max_num_seqs are at most 2**24");
  require(config.hidden_size <= kWidest && config.block_size <= kWidest,
          "hidden_size and block_size are at most 2**20");

  require(config.num_threads >= 1 && config.num_threads <= 1024, "num_threads must be from 1 to 1024");
  require(config.hidden_size >= 1 && config.vocab_size >= 1, "hidden_size and vocab_size must be positive");
  require(config.max_num_batched_tokens >= 1 && config.max_num_seqs >= 1 && config.max_model_len >= 1,
          "max_num_batched_tokens, max_num_seqs and max_model_len must be positive");
  require(config.block_size >= kLanes && config.block_size % kLanes == 0 &&
              (config.block_size < kChunk || config.block_size % kChunk == 0) &&
              (config.block_size >= kSplitKeys ? config.block_size % kSplitKeys == 0
                                               : kSplitKeys % config.block_size == 0),
          "block_size must be 16, 32, 64, 128, 256 or a multiple of 512");
  require(config.num_blocks >= 1, "num_blocks must be positive");
  require(num_hidden_rows(config) <= 0x7fffffff, "the cache holds at most 2**31 - 1 positions");
}

std::size_t num_hidden_rows(const PlanConfig& config) {
  return config.keeps_hidden ? size(config.num_blocks) * size(config.block_size)
                             : size(config.max_num_batched_tokens);
}

void check_batch(const PlanConfig& config, const Batch& batch) {
  const std::size_t seqs = batch.seq_lens.size(), tokens = batch.token_ids.size();
  const std::size_t least = batch.scores() ? 0 : 1;  // a step may score what was computed before, and no more
  require(tokens >= least && tokens <= size(config.max_num_batched_tokens),
          "a step has from 1 to max_num_batched_tokens tokens");
  require(seqs >= least && seqs <= size(config.max_num_seqs), "a step has from 1 to max_num_seqs sequences");
  require(batch.query_starts.size() == seqs + 1 && batch.query_starts.front() == 0 &&
              size(batch.query_starts.back()) == tokens,
          "query_starts must run from 0 to the number of tokens");
  require(batch.max_blocks >= 0 && batch.block_tables.size() == seqs * size(batch.max_blocks),
          "block_tables must be [num_seqs, max_blocks]");
  for (const std::int32_t token : batch.token_ids)
    require(token >= 0 && token < config.vocab_size, "a token id is outside the vocabulary");
  for (std::size_t s = 0; s < seqs; ++s) {
    require(batch.query_starts[s] >= 0 && batch.query_starts[s] < batch.query_starts[s + 1],
            "a sequence's length must be from its rows to max_model_len");
    const int rows = batch.query_starts[s + 1] - batch.query_starts[s];
    const int len = batch.seq_lens[s];
    require(rows >= 1 && len >= rows && len <= config.max_model_len,
            "a sequence's length must be from its rows to max_model_len");
    const int blocks = (len - 1) / config.block_size + 1;
    require(blocks <= batch.max_blocks, "a block table is shorter than its sequence");
    for (const std::int32_t b : batch.block_tables.subspan(s * size(batch.max_blocks), size(blocks)))
      require(b >= 0 && b < config.num_blocks, "a block number is outside the cache");
  }
  require(batch.logits_rows.size() <= size(config.max_num_seqs), "more logits rows than max_num_seqs");
  for (const std::int32_t row : batch.logits_rows)
    require(row >= 0 && size(row) < tokens, "a logits row is outside the step");
}

void check_scores(const PlanConfig& config, const Batch& batch) {
  const std::size_t scores = batch.hidden_rows.size();
  require(scores <= size(config.max_num_batched_tokens), "more scores than max_num_batched_tokens");
  require(batch.score_targets.size() == scores && batch.score_tops.size() == scores,
          "scores need one row, one token and one count each");
  const std::size_t rows = num_hidden_rows(config);
  const std::size_t filled = config.keeps_hidden ? rows : batch.token_ids.size();
  for (std::size_t i = 0; i < scores; ++i) {
    require(batch.hidden_rows[i] >= 0 && size(batch.hidden_rows[i]) < filled,
            "a score's hidden state is outside the cache");
    require(batch.score_targets[i] >= 0 && batch.score_targets[i] < config.vocab_size,
            "a score's token is outside the vocabulary");
    require(batch.score_tops[i] >= 0 && batch.score_tops[i] <= config.vocab_size,
            "a score wants more tokens than the vocabulary has");
  }
}

void check_sampling(const PlanConfig& config, const Batch& batch, std::span<const SampleParams> params) {
  require(params.size() == batch.logits_rows.size(), "sampling needs one entry a logits row");
  const auto known = [&](std::int32_t id) { return id >= 0 && id < config.vocab_size; };
  for (const SampleParams& p : params) {
    require(p.num_history >= 0 && p.num_prompt >= 0 && p.num_prompt <= p.num_history && p.num_bias >= 0,
            "sampling lists have impossible lengths");
    require(std::all_of(p.history, p.history + p.num_history, known) &&
                std::all_of(p.bias_ids, p.bias_ids + p.num_bias, known),
            "a token id in a sampling list is outside the vocabulary");
    require(p.num_logprobs <= config.vocab_size, "more logprobs than the vocabulary has tokens");
  }
}

}  // namespace loadproof
