#include "plan.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>
#include <utility>

namespace loadproof {
namespace {

constexpr int kRowBlock = 256;       // rows that a thread takes at once when there are many
constexpr int kRowsPerThread = 128;  // from this many a thread on, rows are divided instead of columns

int round_up(int x, int to) { return (x + to - 1) / to * to; }
std::size_t size(int x) { return static_cast<std::size_t>(x); }

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

const Kernels* find_kernels(const std::string& isa) {
  const Kernels* kernels = kernels_for(isa);
  require(kernels != nullptr, "this machine or build has no instruction-set level named " + isa);
  return kernels;
}

// The share of `count` items, in units of `unit`, that part `part` of `parts` takes.
std::pair<int, int> share(int count, int part, int parts, int unit) {
  const std::int64_t units = (count + unit - 1) / unit;
  const int begin = static_cast<int>(units * part / parts) * unit;
  const int end = static_cast<int>(units * (part + 1) / parts) * unit;
  return {std::min(begin, count), std::min(end, count)};
}

constexpr int kShareUnit = 4;  // panels: a multiple of every level's group, and of a gate and its up

const bf16* share_of(const PackedMatrix& weight, int part, int parts) {
  const std::ptrdiff_t panel = share(weight.panels(), part, parts, kShareUnit).first;
  return weight.data + panel * weight.k_padded * kLanes;
}

// Elements between rows of bf16 activations: whole chunks, and an odd number of cache lines, so that the rows
// of a tile fall into different sets.
int row_stride(int width) { return (round_up(width, kChunk) / kChunk | 1) * kChunk; }

int head_padded(const AttentionShape& shape) { return round_up(shape.head_dim, kChunk); }

}  // namespace

Plan::Plan(const PlanConfig& config)
    : config_(config), kernels_(find_kernels(config.isa)), pool_(std::max(config.num_threads, 1)) {
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
}

void Plan::set_embedding(std::shared_ptr<const Matrix> table, float scale) {
  require(table && table->k() == config_.hidden_size && table->view().columns >= config_.vocab_size,
          "the embedding is not [vocab_size, hidden_size]");
  embedding_ = std::move(table);
  embedding_scale_ = scale;
}

void Plan::add(Step step) {
  require(!output_norm_, "the output ends a plan");
  if (const auto* s = std::get_if<LinearStep>(&step)) {
    const PackedMatrix w = s->weight->view();
    require(s->out_columns >= 1 && s->out_columns <= w.columns, "out_columns exceeds the matrix");
    require(s->bias.empty() || s->bias.size() == size(w.columns), "a bias needs one entry a padded column");
    if (s->to == Buffer::kQkv) qkv_width_ = std::max(qkv_width_, s->out_columns);
    if (s->to == Buffer::kGated) {
      require(s->epilogue == Epilogue::kGated && w.panels() % 2 == 0,
              "gated output needs gate and up panels");
      gated_stride_ = std::max(gated_stride_, row_stride(w.columns / 2));
    }
    if (s->to == Buffer::kResidual || s->to == Buffer::kProjected)
      require(s->out_columns == config_.hidden_size, "a projection back must be hidden_size wide");
    if (s->from == Buffer::kAttended) attended_stride_ = std::max(attended_stride_, row_stride(w.k_padded));
    if (s->from == Buffer::kGated) gated_stride_ = std::max(gated_stride_, row_stride(w.k_padded));
  }
  if (const auto* s = std::get_if<NormStep>(&step))
    require(s->weight.size() == size(config_.hidden_size), "a norm weight must be [hidden_size]");
  if (const auto* s = std::get_if<QkvStep>(&step)) {
    const AttentionShape& h = s->shape;
    require(h.num_kv_heads >= 1 && h.num_heads % h.num_kv_heads == 0, "heads must divide into kv heads");
    require(h.head_dim >= 2 && h.head_dim <= 512 && h.head_dim % 2 == 0,
            "head_dim must be even, at most 512");
    require(s->layer == static_cast<int>(layer_offset_.size()), "layers must come in order");
    for (const auto* norm : {&s->q_norm, &s->k_norm})
      require(norm->empty() || norm->size() == size(h.head_dim), "a head norm must be [head_dim]");
    if (s->rope) {
      const std::size_t entries = size(config_.max_model_len) * size(h.head_dim / 2);
      require(s->rope->cos.size() == entries && s->rope->sin.size() == entries,
              "rope tables must be [max_model_len, head_dim / 2]");
    }
    require(layer_offset_.empty() || attended_width_ == h.num_heads * h.head_dim,
            "layers must agree in num_heads * head_dim");
    attended_width_ = h.num_heads * h.head_dim;
    const std::size_t plane = size(config_.block_size) * size(head_padded(h));
    layer_offset_.push_back(cache_elements_);
    block_stride_.push_back(size(h.num_kv_heads) * 2 * plane);
    cache_elements_ += block_stride_.back() * size(config_.num_blocks);
    query_width_ = std::max(query_width_, h.num_heads * head_padded(h));
    attended_stride_ = std::max(attended_stride_, row_stride(h.num_heads * h.head_dim));
    scratch_size_ = std::max(scratch_size_, scratch_bytes(head_padded(h), h.num_heads / h.num_kv_heads));
  }
  steps_.push_back(std::move(step));
}

void Plan::set_output(NormStep norm, std::shared_ptr<const Matrix> weight, float softcap) {
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
  cache_ = HugeBuffer(cache_elements_ * sizeof(bf16));
  residual_ = HugeBuffer(most * size(config_.hidden_size) * sizeof(float));
  queries_ = HugeBuffer(most * size(query_width_) * sizeof(bf16));
  logits_ = HugeBuffer(size(config_.max_num_seqs) * size(config_.vocab_size) * sizeof(float) + 64);
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

void Plan::check(const Batch& batch) const {
  const std::size_t seqs = batch.seq_lens.size(), tokens = batch.token_ids.size();
  require(output_norm_.has_value(), "the plan has no output yet");
  require(tokens >= 1 && tokens <= size(config_.max_num_batched_tokens),
          "a step has from 1 to max_num_batched_tokens tokens");
  require(seqs >= 1 && seqs <= size(config_.max_num_seqs), "a step has from 1 to max_num_seqs sequences");
  require(batch.query_starts.size() == seqs + 1 && batch.query_starts.front() == 0 &&
              size(batch.query_starts.back()) == tokens,
          "query_starts must run from 0 to the number of tokens");
  require(batch.max_blocks >= 0 && batch.block_tables.size() == seqs * size(batch.max_blocks),
          "block_tables must be [num_seqs, max_blocks]");
  for (const std::int32_t token : batch.token_ids)
    require(token >= 0 && token < config_.vocab_size, "a token id is outside the vocabulary");
  for (std::size_t s = 0; s < seqs; ++s) {
    const int rows = batch.query_starts[s + 1] - batch.query_starts[s];
    const int len = batch.seq_lens[s];
    require(rows >= 1 && len >= rows && len <= config_.max_model_len,
            "a sequence's length must be from its rows to max_model_len");
    const int blocks = (len + config_.block_size - 1) / config_.block_size;
    require(blocks <= batch.max_blocks, "a block table is shorter than its sequence");
    for (const std::int32_t b : batch.block_tables.subspan(s * size(batch.max_blocks), size(blocks)))
      require(b >= 0 && b < config_.num_blocks, "a block number is outside the cache");
  }
  require(batch.logits_rows.size() <= size(config_.max_num_seqs), "more logits rows than max_num_seqs");
  for (const std::int32_t row : batch.logits_rows)
    require(row >= 0 && size(row) < tokens, "a logits row is outside the step");
}

void Plan::check_sampling(const Batch& batch, std::span<const SampleParams> params) const {
  require(params.size() == batch.logits_rows.size(), "sampling needs one entry a logits row");
  const auto known = [&](std::int32_t id) { return id >= 0 && id < config_.vocab_size; };
  for (const SampleParams& p : params) {
    require(p.num_history >= 0 && p.num_prompt >= 0 && p.num_prompt <= p.num_history && p.num_bias >= 0,
            "sampling lists have impossible lengths");
    require(std::all_of(p.history, p.history + p.num_history, known) &&
                std::all_of(p.bias_ids, p.bias_ids + p.num_bias, known),
            "a token id in a sampling list is outside the vocabulary");
    require(p.num_logprobs <= config_.vocab_size, "more logprobs than the vocabulary has tokens");
  }
}

void Plan::index_rows(const Batch& batch) {
  for (std::size_t s = 0; s < batch.seq_lens.size(); ++s) {
    const int begin = batch.query_starts[s], end = batch.query_starts[s + 1];
    for (int row = begin; row < end; ++row) {
      row_seq_[size(row)] = static_cast<std::int32_t>(s);
      positions_[size(row)] = batch.seq_lens[s] - (end - row);
    }
  }
}

void Plan::run(const Batch& batch, std::span<const SampleParams> params, std::span<SampleResult> results) {
  check(batch);
  check_sampling(batch, params);
  require(results.size() == params.size(), "one result a logits row");
  index_rows(batch);
  batch_ = batch;
  params_ = params;
  results_ = results;
  num_rows_ = static_cast<int>(batch.token_ids.size());
  num_logits_ = static_cast<int>(batch.logits_rows.size());
  const int threads = pool_.size();
  const bool by_rows = num_rows_ >= kRowsPerThread * threads;
  row_block_ = std::min(kRowBlock, round_up((num_rows_ + threads - 1) / threads, kRowTile));
  for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
  pool_.run([&](int thread) {
    kernels_->begin_thread();
    if (by_rows)
      run_by_rows(thread);
    else
      run_by_columns(thread);
    run_output(thread);
    kernels_->end_thread();
  });
}

Plan::Rows Plan::rows_of(int begin, int end, Arena& arena) {
  assert(end - begin <= arena.rows);
  const BatchView view{batch_.query_starts.data(),
                       batch_.seq_lens.data(),
                       batch_.block_tables.data(),
                       row_seq_.data() + begin,
                       positions_.data() + begin,
                       batch_.max_blocks,
                       begin};
  return {begin, end, &arena, view};
}

// Every step is shared by all threads.
void Plan::run_by_columns(int thread) {
  const int parts = pool_.size();
  const auto [first, last] = share(num_rows_, thread, parts, 1);
  embed_rows(first, last);
  pool_.barrier();
  const Rows rows = rows_of(0, num_rows_, arenas_[0]);
  for (const Step& step : steps_) {
    run_step(step, rows, thread, parts, thread);
    pool_.barrier();
  }
}

// Each segment is run for every row block by whichever thread takes it.
void Plan::run_by_rows(int thread) {
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    while (true) {
      const int begin = counters_[i].fetch_add(row_block_, std::memory_order_relaxed);
      if (begin >= num_rows_) break;
      const int end = std::min(begin + row_block_, num_rows_);
      if (i == 0) embed_rows(begin, end);
      const Rows rows = rows_of(begin, end, arenas_[size(thread)]);
      for (const Step& step : segments_[i]) run_step(step, rows, 0, 1, thread);
    }
    pool_.barrier();
  }
}

void Plan::embed_rows(int begin, int end) {
  kernels_->embed({embedding_->view(), batch_.token_ids.data(), embedding_scale_, config_.hidden_size,
                   residual_.as<float>()},
                  begin, end);
}

void Plan::run_output(int thread) {
  if (num_logits_ == 0) return;
  const int parts = pool_.size();
  const Rows rows = rows_of(0, 0, arenas_[0]);
  NormArgs norm = norm_args(*output_norm_, rows);
  norm.x = residual_.as<float>();
  norm.gather = batch_.logits_rows.data();
  const auto [first, last] = share(num_logits_, thread, parts, 1);
  kernels_->norm(norm, first, last);
  pool_.barrier();
  LinearArgs linear{};
  linear.a = norm.out_bf16;
  linear.a_stride = norm.out_stride;
  linear.weight = output_weight_->view();
  linear.epilogue = output_softcap_ > 0 ? Epilogue::kSoftcap : Epilogue::kStore;
  linear.softcap = output_softcap_;
  linear.out = logits_.as<float>();
  linear.out_columns = linear.out_stride = config_.vocab_size;
  linear.next = linear.weight.data;  // nothing follows: any memory that is there
  const auto [panel, panel_end] = share(linear.weight.panels(), thread, parts, kShareUnit);
  kernels_->linear(linear, 0, num_logits_, panel, panel_end, scratch(thread));
  pool_.barrier();
  std::byte* memory = sample_memory_.as<std::byte>() + size(thread) * sample_bytes();
  const std::size_t keys = SampleScratch::num_keys(size(config_.vocab_size));
  const SampleScratch scratch{reinterpret_cast<float*>(memory + keys * sizeof(std::uint64_t)),
                              reinterpret_cast<std::uint64_t*>(memory)};
  for (int row = thread; row < num_logits_; row += parts)
    kernels_->sample_row(linear.out + size(row) * size(config_.vocab_size), config_.vocab_size,
                         params_[size(row)], scratch, &results_[size(row)]);
}

// Part `part` of `parts` of a step over a row block.
void Plan::run_step(const Step& step, const Rows& rows, int part, int parts, int thread) {
  if (const auto* s = std::get_if<NormStep>(&step)) {
    const auto [first, last] = share(rows.count(), part, parts, 1);
    kernels_->norm(norm_args(*s, rows), first, last);
  } else if (const auto* s = std::get_if<LinearStep>(&step)) {
    LinearArgs args = linear_args(*s, rows);
    if (parts > 1 || rows.count() < kRowsPerThread) args.next = next_weights(step, part, parts);
    const auto [first, last] = share(args.weight.panels(), part, parts, kShareUnit);
    kernels_->linear(args, 0, rows.count(), first, last, scratch(thread));
  } else if (const auto* s = std::get_if<QkvStep>(&step)) {
    // Items are (row, kv head) pairs when rows are too few to divide.
    const QkvArgs args = qkv_args(*s, rows);
    if (rows.count() >= parts) {
      const auto [first, last] = share(rows.count(), part, parts, 1);
      kernels_->qkv(args, rows.batch, first, last, 0, s->shape.num_kv_heads);
    } else {
      const auto [first, last] = share(s->shape.num_kv_heads, part, parts, 1);
      kernels_->qkv(args, rows.batch, 0, rows.count(), first, last);
    }
  } else {
    const auto& a = std::get<AttentionStep>(step);
    const AttentionArgs args = attention_args(a, rows);
    if (parts == 1) {
      kernels_->attention(args, rows.batch, 0, rows.count(), 0, a.shape.num_kv_heads, scratch(thread));
    } else if (rows.count() >= 4 * parts) {
      const auto [first, last] = share(rows.count(), part, parts, 1);
      kernels_->attention(args, rows.batch, first, last, 0, a.shape.num_kv_heads, scratch(thread));
    } else {
      const int items = rows.count() * a.shape.num_kv_heads;
      for (int i = part; i < items; i += parts) {
        const int row = i / a.shape.num_kv_heads, group = i % a.shape.num_kv_heads;
        kernels_->attention(args, rows.batch, row, row + 1, group, group + 1, scratch(thread));
      }
    }
  }
}

// Where a part's share of the weights after `step` begins.
const bf16* Plan::next_weights(const Step& step, int part, int parts) const {
  const Step* last = steps_.data() + steps_.size();
  for (const Step* s = &step + 1; s < last; ++s)
    if (const auto* linear = std::get_if<LinearStep>(s)) return share_of(linear->weight->view(), part, parts);
  return share_of(output_weight_->view(), part, parts);
}

float* Plan::floats(Buffer buffer, const Rows& rows) const {
  switch (buffer) {
    case Buffer::kResidual:
      return residual_.as<float>() + size(rows.begin) * size(config_.hidden_size);
    case Buffer::kQkv:
      return rows.arena->qkv.as<float>();
    case Buffer::kProjected:
      return rows.arena->projected.as<float>();
    default:
      assert(false && "not a float buffer");
      return nullptr;
  }
}

bf16* Plan::halves(Buffer buffer, const Rows& rows) const {
  switch (buffer) {
    case Buffer::kNormed:
      return rows.arena->normed.as<bf16>();
    case Buffer::kAttended:
      return rows.arena->attended.as<bf16>();
    case Buffer::kGated:
      return rows.arena->gated.as<bf16>();
    default:
      assert(false && "not a bf16 buffer");
      return nullptr;
  }
}

NormArgs Plan::norm_args(const NormStep& step, const Rows& rows) const {
  NormArgs args{};
  args.x = step.from == Buffer::kNormed ? nullptr : floats(step.from, rows);
  args.weight = step.weight.data();
  args.eps = step.eps;
  args.offset = step.offset;
  args.width = config_.hidden_size;
  args.output = step.output;
  args.out_stride = row_stride(config_.hidden_size);
  if (step.output == NormOutput::kBf16)
    args.out_bf16 = halves(step.to, rows);
  else
    args.out = floats(step.to, rows);
  return args;
}

LinearArgs Plan::linear_args(const LinearStep& step, const Rows& rows) const {
  LinearArgs args{};
  args.a = halves(step.from, rows);
  args.weight = step.weight->view();
  args.a_stride = step.from == Buffer::kNormed     ? row_stride(config_.hidden_size)
                  : step.from == Buffer::kAttended ? attended_stride_
                                                   : gated_stride_;
  args.bias = step.bias.empty() ? nullptr : step.bias.data();
  args.epilogue = step.epilogue;
  args.gate = step.gate;
  args.out_columns = step.out_columns;
  if (step.epilogue == Epilogue::kGated) {
    args.out_bf16 = halves(step.to, rows);
    args.out_stride = gated_stride_;
  } else {
    args.out = floats(step.to, rows);
    args.out_stride = step.to == Buffer::kQkv ? qkv_width_ : config_.hidden_size;
  }
  return args;
}

CacheView Plan::cache_view(const AttentionShape& shape, int layer) const {
  const int dp = head_padded(shape);
  return {cache_.as<bf16>() + layer_offset_[size(layer)], block_stride_[size(layer)],
          size(config_.block_size) * size(dp), config_.block_size, dp};
}

QkvArgs Plan::qkv_args(const QkvStep& step, const Rows& rows) const {
  QkvArgs args{};
  args.qkv = floats(Buffer::kQkv, rows);
  args.qkv_stride = qkv_width_;
  args.num_heads = step.shape.num_heads;
  args.num_kv_heads = step.shape.num_kv_heads;
  args.head_dim = step.shape.head_dim;
  args.q_norm = step.q_norm.empty() ? nullptr : step.q_norm.data();
  args.k_norm = step.k_norm.empty() ? nullptr : step.k_norm.data();
  args.norm_eps = step.norm_eps;
  args.norm_offset = step.norm_offset;
  args.cos = step.rope ? step.rope->cos.data() : nullptr;
  args.sin = step.rope ? step.rope->sin.data() : nullptr;
  args.cache = cache_view(step.shape, step.layer);
  args.q = queries_.as<bf16>() + size(rows.begin) * size(step.shape.num_heads) * size(args.cache.head_padded);
  return args;
}

AttentionArgs Plan::attention_args(const AttentionStep& step, const Rows& rows) const {
  AttentionArgs args{};
  args.cache = cache_view(step.shape, step.layer);
  args.q = queries_.as<bf16>() + size(rows.begin) * size(step.shape.num_heads) * size(args.cache.head_padded);
  args.num_heads = step.shape.num_heads;
  args.num_kv_heads = step.shape.num_kv_heads;
  args.head_dim = step.shape.head_dim;
  args.scale = step.scale;
  args.softcap = step.softcap;
  args.window = step.window;
  args.out = rows.arena->attended.as<bf16>();
  args.out_stride = attended_stride_;
  return args;
}

std::size_t Plan::sample_bytes() const {
  const std::size_t vocab = size(config_.vocab_size);
  const std::size_t bytes = SampleScratch::num_floats(vocab) * sizeof(float) +
                            SampleScratch::num_keys(vocab) * sizeof(std::uint64_t);
  return (bytes + 63) / 64 * 64;
}

Scratch Plan::scratch(int thread) const {
  return {scratch_memory_.as<std::byte>() + scratch_size_ * size(thread)};
}

std::span<const float> Plan::logits() const {
  return {logits_.as<float>(), size(num_logits_) * size(config_.vocab_size)};
}

}  // namespace loadproof
