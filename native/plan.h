// A model as a list of steps, and the machine that runs them for any mix of rows.
//
// Few rows: every step is shared by all threads, column by column, with a barrier after it, so each weight is
// read from memory once (division.h). Many rows: threads take blocks of rows and run a whole layer for their
// block, all its intermediate values in their own cache; the one barrier a layer stands before attention,
// which reads keys of every row. Which way runs makes no difference to any bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "batch.h"
#include "division.h"
#include "kernels.h"
#include "matrix.h"
#include "threads.h"

namespace loadproof {

// The activations of a step. Residual and queries cross barriers and have a row for every token of a step;
// the others live within a row block.
enum class Buffer { kResidual, kNormed, kQkv, kAttended, kGated, kProjected };

struct NormStep {
  Buffer from, to;
  NormOutput output;
  std::vector<float> weight;
  float eps, offset;
};

struct LinearStep {
  Buffer from, to;
  std::shared_ptr<const Matrix> weight;
  std::vector<float> bias;  // empty, or one for each padded column
  int out_columns;
  Epilogue epilogue;
  Gate gate;
};

// Cosines and sines of one rope, shared by the layers that use it: [positions, head_dim / 2] each.
struct RopeTable {
  std::vector<float> cos, sin;
};

struct AttentionShape {
  int num_heads, num_kv_heads, head_dim;
  bool operator==(const AttentionShape&) const = default;
};

struct QkvStep {
  AttentionShape shape;
  int layer;
  std::vector<float> q_norm, k_norm;  // empty, or [head_dim]
  float norm_eps, norm_offset;
  std::shared_ptr<const RopeTable> rope;  // null for none
};

struct AttentionStep {
  AttentionShape shape;
  int layer;
  float scale, softcap;
  int window;
};

using Step = std::variant<NormStep, LinearStep, QkvStep, AttentionStep>;

class Plan {
 public:
  explicit Plan(const PlanConfig& config);

  // Building, in order of execution: embedding first, output last; throws std::invalid_argument for parts
  // that do not fit.
  void set_embedding(std::shared_ptr<const Matrix> table, float scale);
  void add(Step step);
  void set_output(NormStep norm, std::shared_ptr<const Matrix> weight, float softcap);

  // Throws std::invalid_argument for a batch that run() must not see; any thread may ask.
  void check(const Batch& batch, std::span<const SampleParams> params) const;

  // Called once by a thread that calls run() as long as it lives: gives it a core of its own (ThreadPool).
  void settle() const { pool_.settle(); }

  // Runs a batch that was checked and samples one token for each of its logits rows: `params` and `results`
  // have R entries. Then `scores` get the log-probabilities of their tokens, which are set: N entries. No
  // allocation. One run at a time: the caller's part.
  void run(const Batch& batch, std::span<const SampleParams> params, std::span<SampleResult> results,
           std::span<SampleResult> scores);

  // Raw logits of the last run: [R, vocab_size].
  std::span<const float> logits() const;

  const PlanConfig& config() const { return config_; }
  std::size_t cache_bytes() const { return cache_.size(); }

 private:
  // Intermediate values of one row block. Arena 0 serves all threads when columns are divided.
  struct Arena {
    int rows;
    HugeBuffer normed, qkv, attended, gated, projected;
  };
  // Rows [begin, end) of the step in an arena.
  struct Rows {
    int begin, end;
    Arena* arena;
    BatchView batch;
    int count() const { return end - begin; }
  };

  // What a step needs of the buffers, checked and added up.
  void measure(const LinearStep& step);
  void measure(const QkvStep& step);
  void allocate();
  void index_rows(const Batch& batch);
  void run_by_columns(Division::Member& member);
  void run_by_rows(int thread);
  void embed_rows(int begin, int end);
  void keep_hidden(int thread);
  void run_scores(Division::Member& member);
  void run_output(Division::Member& member);
  void run_logits(Division::Member& member, const bf16* hidden, int num_rows);

  Rows rows_of(int begin, int end, Arena& arena);
  // A worker is a Division::Member, or Alone.
  template <class Worker>
  void run_step(const Step& step, const Rows& rows, Worker& worker);
  template <class Worker>
  void run_linear(LinearArgs args, int num_rows, const bf16* next, Worker& worker);
  NormArgs norm_args(const NormStep& step, const Rows& rows) const;
  LinearArgs linear_args(const LinearStep& step, const Rows& rows) const;
  QkvArgs qkv_args(const QkvStep& step, const Rows& rows) const;
  AttentionArgs attention_args(const AttentionStep& step, const Rows& rows) const;
  CacheView cache_view(const AttentionShape& shape, int layer) const;
  const bf16* next_weights(const Step& step, int part, int parts) const;
  float* floats(Buffer buffer, const Rows& rows) const;
  bf16* halves(Buffer buffer, const Rows& rows) const;
  std::size_t sample_bytes() const;
  std::size_t hidden_index(int row) const;
  SampleScratch sample_scratch(int thread) const;
  Scratch scratch(int thread) const;

  PlanConfig config_;
  const Kernels* kernels_;
  ThreadPool pool_;
  Division division_{pool_.size()};
  std::vector<Step> steps_;
  std::shared_ptr<const Matrix> embedding_;
  float embedding_scale_ = 1.0f;
  std::optional<NormStep> output_norm_;
  std::shared_ptr<const Matrix> output_weight_;
  float output_softcap_ = 0.0f;

  // Widths, from the steps.
  int qkv_width_ = 0, query_width_ = 0, attended_width_ = 0, attended_stride_ = 0, gated_stride_ = 0;
  std::size_t scratch_size_ = 4096;
  std::vector<std::size_t> layer_offset_;  // elements of the cache before each layer
  std::vector<std::size_t> block_stride_;  // elements of a block, by layer
  std::size_t cache_elements_ = 0;

  // Memory, taken once by allocate().
  HugeBuffer cache_, hidden_, residual_, queries_, logits_, scratch_memory_, sample_memory_;
  std::vector<Arena> arenas_;
  std::vector<std::int32_t> row_seq_, positions_;
  std::vector<std::span<const Step>> segments_;  // steps that a row block runs without waiting
  std::vector<std::atomic<int>> counters_;       // rows taken, by segment

  // The step being run.
  Batch batch_{};
  std::span<const SampleParams> params_;
  std::span<SampleResult> results_, scores_;
  int num_rows_ = 0, row_block_ = 0, num_logits_ = 0;
};

}  // namespace loadproof
