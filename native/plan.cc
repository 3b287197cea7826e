#include "plan.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "layout.h"

namespace loadproof {
namespace {

constexpr int kMostHeads = 1 << 16, kMostPlane = 1 << 30;

// Sizes of memory, which no machine has where they overflow.
std::size_t product_of(std::size_t a, std::size_t b) {
  std::size_t c;
  if (__builtin_mul_overflow(a, b, &c)) throw std::bad_alloc();
  return c;
}
std::size_t sum_of(std::size_t a, std::size_t b) {
  std::size_t c;
  if (__builtin_add_overflow(a, b, &c)) throw std::bad_alloc();
  return c;
}

const PlanConfig& checked(const PlanConfig& config) {
  check_config(config);
  return config;
}

const Kernels* find_kernels(const std::string& isa) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels)
    throw std::invalid_argument("this machine or build has no instruction-set level named " + isa);
  return kernels;
}

}  // namespace

Plan::Plan(const PlanConfig& config)
    : config_(checked(config)), kernels_(find_kernels(config.isa)), pool_(config.num_threads) {}

void Plan::set_embedding(std::shared_ptr<const Matrix> table, float scale) {
  require(table && table->k() == config_.hidden_size && table->view().columns >= config_.vocab_size,
          "the embedding is not [vocab_size, hidden_size]");
  embedding_ = std::move(table);
  embedding_scale_ = scale;
}

void Plan::add(Step step) {
  require(!output_norm_, "the output ends a plan");
  if (const auto* linear = std::get_if<LinearStep>(&step)) measure(*linear);
  if (const auto* qkv = std::get_if<QkvStep>(&step)) measure(*qkv);
  if (const auto* norm = std::get_if<NormStep>(&step)) {
    const bool rounds = norm->output == NormOutput::kBf16;
    require(norm->weight.size() == size(config_.hidden_size), "a norm weight must be [hidden_size]");
    require(norm->from == Buffer::kResidual || norm->from == Buffer::kProjected, "a norm reads floats");
    require(rounds ? norm->to == Buffer::kNormed
                   : norm->to == Buffer::kResidual || norm->to == Buffer::kProjected,
            "a norm writes the normed buffer in bf16, or floats of its own width");
  }
  if (const auto* attention = std::get_if<AttentionStep>(&step)) {
    const auto* qkv = steps_.empty() ? nullptr : std::get_if<QkvStep>(&steps_.back());
    require(qkv && qkv->layer == attention->layer && qkv->shape == attention->shape,
            "attention follows its keys, of the same shape");
  }
  steps_.push_back(std::move(step));
}

void Plan::measure(const LinearStep& step) {
  const PackedMatrix w = step.weight->view();
  const bool gated = step.epilogue == Epilogue::kGated;
  require(step.out_columns >= 1 && step.out_columns <= w.columns, "out_columns exceeds the matrix");
  require(step.bias.empty() || step.bias.size() == size(w.columns), "a bias needs one entry a padded column");
  require(gated == (step.to == Buffer::kGated), "gated products go to the gated buffer, and no others");
  require(step.from == Buffer::kNormed || step.from == Buffer::kAttended || step.from == Buffer::kGated,
          "a product reads bf16");
  require(step.to != Buffer::kNormed && step.to != Buffer::kAttended,
          "a product writes floats, or gated bf16");
  require(!gated || w.panels() % 2 == 0, "gated output needs gate and up panels");
  if (gated) gated_stride_ = std::max(gated_stride_, row_stride(w.columns / 2));
  if (step.to == Buffer::kQkv) qkv_width_ = std::max(qkv_width_, step.out_columns);
  if (step.to == Buffer::kResidual || step.to == Buffer::kProjected)
    require(step.out_columns == config_.hidden_size, "a projection back must be hidden_size wide");
  if (step.from == Buffer::kNormed)
    require(step.weight->k() == config_.hidden_size, "input is hidden_size wide");
  if (step.from == Buffer::kAttended) attended_stride_ = std::max(attended_stride_, row_stride(w.k_padded));
  if (step.from == Buffer::kGated) gated_stride_ = std::max(gated_stride_, row_stride(w.k_padded));
}

void Plan::measure(const QkvStep& step) {
  const AttentionShape& h = step.shape;
  require(h.num_kv_heads >= 1 && h.num_heads >= 1 && h.num_heads % h.num_kv_heads == 0,
          "heads must divide into kv heads");
  require(h.head_dim >= 2 && h.head_dim <= kMaxHeadDim && h.head_dim % 2 == 0,
          "head_dim must be even, at most 512");
  require(h.num_heads <= kMostHeads, "at most 2**16 heads");
  require(step.layer == static_cast<int>(layer_offset_.size()), "layers must come in order");
  require(qkv_width_ >= (h.num_heads + 2 * h.num_kv_heads) * h.head_dim,
          "queries, keys and values come first");
  for (const auto* norm : {&step.q_norm, &step.k_norm})
    require(norm->empty() || norm->size() == size(h.head_dim), "a head norm must be [head_dim]");
  if (step.rope) {
    const std::size_t entries = size(config_.max_model_len) * size(h.head_dim / 2);
    require(step.rope->cos.size() == entries && step.rope->sin.size() == entries,
            "rope tables must be [max_model_len, head_dim / 2]");
  }
  // Padding of narrower rows is never written, so it stays zero: rows must be equally wide in every layer.
  require(layer_offset_.empty() || attended_width_ == h.num_heads * h.head_dim,
          "layers must agree in num_heads * head_dim");
  attended_width_ = h.num_heads * h.head_dim;
  const int dp = head_padded(h.head_dim);
  require(size(config_.block_size) * size(dp) <= size(kMostPlane),
          "a block's plane is at most 2**30 elements");
  layer_offset_.push_back(cache_elements_);
  block_stride_.push_back(size(h.num_kv_heads) * 2 * size(config_.block_size) * size(dp));
  cache_elements_ = sum_of(cache_elements_, product_of(block_stride_.back(), size(config_.num_blocks)));
  query_width_ = std::max(query_width_, h.num_heads * dp);
  attended_stride_ = std::max(attended_stride_, row_stride(attended_width_));
  scratch_size_ = std::max(scratch_size_, scratch_bytes(dp, h.num_heads / h.num_kv_heads));
}

void Plan::set_output(NormStep norm, std::shared_ptr<const Matrix> weight, float softcap) {
  require(!output_norm_, "the output ends a plan");
  require(embedding_ != nullptr, "the embedding starts a plan");
  require(!steps_.empty(), "a plan has at least one step");
  require(norm.weight.size() == size(config_.hidden_size), "a norm weight must be [hidden_size]");
  require(weight && weight->k() == config_.hidden_size && weight->view().columns >= config_.vocab_size,
          "the output weight is not [vocab_size, hidden_size]");
  output_norm_ = std::move(norm);
  output_weight_ = std::move(weight);
  output_softcap_ = softcap;
  allocate();
}

void Plan::allocate() {
  // Row tiles read up to a multiple of 32 rows, so every buffer has that many more.
  const auto rows = [](int n) { return size(round_up(n, kRowTile) + kRowTile); };
  const std::size_t most = rows(config_.max_num_batched_tokens);
  cache_ = HugeBuffer(product_of(cache_elements_, sizeof(bf16)));
  residual_ = HugeBuffer(most * size(config_.hidden_size) * sizeof(float));
  queries_ = HugeBuffer(most * size(query_width_) * sizeof(bf16));
  const int logits_rows =
      std::max(config_.max_num_seqs, std::min(kScoreRows, config_.max_num_batched_tokens));
  logits_ = HugeBuffer(size(logits_rows) * size(config_.vocab_size) * sizeof(float) + 64);
  hidden_ =
      HugeBuffer(product_of(num_hidden_rows(config_), size(row_stride(config_.hidden_size)) * sizeof(bf16)));
  const int threads = pool_.size();
  scratch_memory_ = HugeBuffer(scratch_size_ * size(threads));
  sample_memory_ = HugeBuffer(size(threads) * sample_bytes());
  const int shared = std::max({kRowBlock, kRowsPerThread * threads, config_.max_num_seqs});
  for (int t = 0; t < threads; ++t) {
    Arena arena{t == 0 ? shared : kRowBlock, {}, {}, {}, {}, {}};
    const std::size_t n = rows(arena.rows);
    const std::size_t hidden_padded = size(row_stride(config_.hidden_size));
    arena.normed = HugeBuffer(n * hidden_padded * sizeof(bf16));
    arena.qkv = HugeBuffer(n * size(qkv_width_) * sizeof(float));
    arena.attended = HugeBuffer(n * size(attended_stride_) * sizeof(bf16));
    arena.gated = HugeBuffer(n * size(gated_stride_) * sizeof(bf16));
    arena.projected = HugeBuffer(n * size(config_.hidden_size) * sizeof(float));
    arenas_.push_back(std::move(arena));
  }
  row_seq_.resize(size(config_.max_num_batched_tokens));
  positions_.resize(size(config_.max_num_batched_tokens));
  // A segment ends where attention needs the keys of every row.
  std::size_t begin = 0;
  for (std::size_t i = 1; i <= steps_.size(); ++i) {
    if (i < steps_.size() && !std::holds_alternative<AttentionStep>(steps_[i])) continue;
    segments_.push_back(std::span<const Step>(steps_).subspan(begin, i - begin));
    begin = i;
  }
  counters_ = std::vector<std::atomic<int>>(segments_.size());
}

}  // namespace loadproof
