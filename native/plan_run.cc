// Running a plan: which thread does what, and the arguments of each kernel call.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "layout.h"
#include "plan.h"

namespace loadproof {
namespace {

// Where a part's share of a weight begins.
const bf16* share_of(const PackedMatrix& weight, int part, int parts) {
  const std::ptrdiff_t panel = share(weight.panels(), part, parts, kShareUnit).first;
  return weight.data + panel * weight.k_padded * kLanes;
}

}  // namespace

void Plan::index_rows(const Batch& batch) {
  for (std::size_t s = 0; s < batch.seq_lens.size(); ++s) {
    const int begin = batch.query_starts[s], end = batch.query_starts[s + 1];
    for (int row = begin; row < end; ++row) {
      row_seq_[size(row)] = static_cast<std::int32_t>(s);
      positions_[size(row)] = batch.seq_lens[s] - (end - row);
    }
  }
}

void Plan::check(const Batch& batch, std::span<const SampleParams> params) const {
  require(output_norm_.has_value(), "the plan has no output yet");
  check_batch(config_, batch);
  check_sampling(config_, batch, params);
  check_scores(config_, batch);
}

void Plan::run(const Batch& batch, std::span<const SampleParams> params, std::span<SampleResult> results,
               std::span<SampleResult> scores) {
  assert(params.size() == batch.logits_rows.size() && results.size() == params.size());
  assert(scores.size() == batch.hidden_rows.size());
  index_rows(batch);
  batch_ = batch;
  params_ = params;
  results_ = results;
  scores_ = scores;
  num_rows_ = static_cast<int>(batch.token_ids.size());
  num_logits_ = static_cast<int>(batch.logits_rows.size());
  const int threads = pool_.size();
  const bool by_rows = num_rows_ >= kRowsPerThread * threads;
  // As many blocks as fit, of one size: a small one at the end would stream all weights for a few rows.
  const int blocks = threads * std::max(1, ceil_div(num_rows_, threads * kRowBlock));
  row_block_ = round_up(ceil_div(num_rows_, blocks), kRowTile);
  for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
  division_.reset();
  pool_.run([&](int thread) {
    kernels_->begin_thread();
    Division::Member member(division_, thread);
    if (by_rows)
      run_by_rows(thread);
    else if (num_rows_ > 0)
      run_by_columns(member);
    if (config_.keeps_hidden || batch_.scores()) keep_hidden(thread);
    run_scores(member);
    run_output(member);
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
void Plan::run_by_columns(Division::Member& member) {
  const auto [first, last] = share(num_rows_, member.thread(), pool_.size(), 1);
  embed_rows(first, last);
  pool_.barrier();
  const Rows rows = rows_of(0, num_rows_, arenas_[0]);
  for (const Step& step : steps_) {
    run_step(step, rows, member);
    pool_.barrier();
  }
}

// Each segment is run for every row block by whichever thread takes it.
void Plan::run_by_rows(int thread) {
  const Alone alone(thread);
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    while (true) {
      const int begin = counters_[i].fetch_add(row_block_, std::memory_order_relaxed);
      if (begin >= num_rows_) break;
      const int end = std::min(begin + row_block_, num_rows_);
      if (i == 0) embed_rows(begin, end);
      const Rows rows = rows_of(begin, end, arenas_[size(thread)]);
      for (const Step& step : segments_[i]) run_step(step, rows, alone);
    }
    pool_.barrier();
  }
}

void Plan::embed_rows(int begin, int end) {
  kernels_->embed({embedding_->view(), batch_.token_ids.data(), embedding_scale_, config_.hidden_size,
                   residual_.as<float>()},
                  begin, end);
}

// Where the final hidden state of a row of the step is kept.
std::size_t Plan::hidden_index(int row) const {
  if (!config_.keeps_hidden) return size(row);
  const int position = positions_[size(row)];
  const std::size_t entry =
      size(row_seq_[size(row)]) * size(batch_.max_blocks) + size(position / config_.block_size);
  return size(batch_.block_tables[entry]) * size(config_.block_size) + size(position % config_.block_size);
}

void Plan::keep_hidden(int thread) {
  const auto [first, last] = share(num_rows_, thread, pool_.size(), 1);
  NormArgs norm = norm_args(*output_norm_, rows_of(0, 0, arenas_[0]));
  norm.x = residual_.as<float>();
  for (std::int32_t row = first; row < last; ++row) {
    norm.gather = &row;
    norm.out_bf16 = hidden_.as<bf16>() + hidden_index(row) * size(norm.out_stride);
    kernels_->norm(norm, 0, 1);
  }
  pool_.barrier();
}

// Logits of so many rows at a time that each weight is used often for once that it is read.
void Plan::run_scores(Division::Member& member) {
  const int thread = member.thread(), parts = pool_.size(), stride = row_stride(config_.hidden_size);
  const int total = static_cast<int>(batch_.hidden_rows.size());
  bf16* gathered = arenas_[0].normed.as<bf16>();
  for (int begin = 0; begin < total; begin += kScoreRows) {
    const int count = std::min(kScoreRows, total - begin);
    const auto [first, last] = share(count, thread, parts, 1);
    for (int row = first; row < last; ++row)
      std::memcpy(gathered + size(row) * size(stride),
                  hidden_.as<bf16>() + size(batch_.hidden_rows[size(begin + row)]) * size(stride),
                  size(stride) * sizeof(bf16));
    pool_.barrier();
    run_logits(member, gathered, count);
    for (int row = thread; row < count; row += parts)
      kernels_->score_row(logits_.as<float>() + size(row) * size(config_.vocab_size), config_.vocab_size,
                          batch_.score_tops[size(begin + row)], config_.logprobs_mode, sample_scratch(thread),
                          &scores_[size(begin + row)]);
    pool_.barrier();
  }
}

void Plan::run_output(Division::Member& member) {
  if (num_logits_ == 0) return;
  const int thread = member.thread(), parts = pool_.size();
  NormArgs norm = norm_args(*output_norm_, rows_of(0, 0, arenas_[0]));
  norm.x = residual_.as<float>();
  norm.gather = batch_.logits_rows.data();
  const auto [first, last] = share(num_logits_, thread, parts, 1);
  kernels_->norm(norm, first, last);
  pool_.barrier();
  run_logits(member, norm.out_bf16, num_logits_);
  for (int row = thread; row < num_logits_; row += parts)
    kernels_->sample_row(logits_.as<float>() + size(row) * size(config_.vocab_size), config_.vocab_size,
                         params_[size(row)], sample_scratch(thread), &results_[size(row)]);
}

// Logits of normed rows [num_rows, row_stride(hidden_size)]; all are there when this returns.
void Plan::run_logits(Division::Member& member, const bf16* hidden, int num_rows) {
  LinearArgs linear{};
  linear.a = hidden;
  linear.a_stride = row_stride(config_.hidden_size);
  linear.weight = output_weight_->view();
  linear.epilogue = output_softcap_ > 0 ? Epilogue::kSoftcap : Epilogue::kStore;
  linear.softcap = output_softcap_;
  linear.out = logits_.as<float>();
  linear.out_columns = linear.out_stride = config_.vocab_size;
  run_linear(linear, num_rows, linear.weight.data, member);  // nothing follows: any memory that is there
  pool_.barrier();
}

// What `worker` does of a step over a row block: all of it, or its pieces.
template <class Worker>
void Plan::run_step(const Step& step, const Rows& rows, Worker& worker) {
  const int parts = worker.parts(), count = rows.count(), thread = worker.thread();
  const int few_rows = std::max(1, count / (kPieces * parts));
  if (const auto* norm = std::get_if<NormStep>(&step)) {
    const NormArgs args = norm_args(*norm, rows);
    worker.run(count, 1, few_rows, [&](int begin, int end, int) { kernels_->norm(args, begin, end); });
  } else if (const auto* linear = std::get_if<LinearStep>(&step)) {
    const bool streams = parts > 1 || count < kRowsPerThread;  // weights are read from memory once
    run_linear(linear_args(*linear, rows), count,
               streams ? next_weights(step, worker.part(), parts) : nullptr, worker);
  } else if (const auto* qkv = std::get_if<QkvStep>(&step)) {
    const QkvArgs args = qkv_args(*qkv, rows);
    const int groups = qkv->shape.num_kv_heads;
    if (count >= parts)
      worker.run(count, 1, few_rows,
                 [&](int begin, int end, int) { kernels_->qkv(args, rows.batch, begin, end, 0, groups); });
    else
      worker.run(groups, 1, 1,
                 [&](int begin, int end, int) { kernels_->qkv(args, rows.batch, 0, count, begin, end); });
  } else {
    const auto& attention = std::get<AttentionStep>(step);
    const AttentionArgs args = attention_args(attention, rows);
    const int groups = attention.shape.num_kv_heads;
    if (parts == 1 || count >= 4 * parts)
      worker.run(count, 1, few_rows, [&](int begin, int end, int) {
        kernels_->attention(args, rows.batch, begin, end, 0, groups, scratch(thread));
      });
    else  // rows are too few to divide: their heads are
      worker.run(count * groups, 1, 1, [&](int begin, int end, int) {
        for (int item = begin; item < end; ++item) {
          const int row = item / groups, group = item % groups;
          kernels_->attention(args, rows.batch, row, row + 1, group, group + 1, scratch(thread));
        }
      });
  }
}

// A worker's panels of a product of `num_rows` rows. After its share the weights at `next` are asked for;
// null for many rows, whose weights are in cache.
template <class Worker>
void Plan::run_linear(LinearArgs args, int num_rows, const bf16* next, Worker& worker) {
  const std::ptrdiff_t panel = static_cast<std::ptrdiff_t>(args.weight.k_padded) * kLanes;
  worker.run(args.weight.panels(), kShareUnit, kPiecePanels, [&](int begin, int end, int share_end) {
    args.next = end < share_end ? args.weight.data + end * panel : next;
    kernels_->linear(args, 0, num_rows, begin, end, scratch(worker.thread()));
  });
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
  const int dp = head_padded(shape.head_dim);
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

SampleScratch Plan::sample_scratch(int thread) const {
  std::byte* memory = sample_memory_.as<std::byte>() + size(thread) * sample_bytes();
  const std::size_t keys = SampleScratch::num_keys(size(config_.vocab_size));
  return {reinterpret_cast<float*>(memory + keys * sizeof(std::uint64_t)),
          reinterpret_cast<std::uint64_t*>(memory)};
}

Scratch Plan::scratch(int thread) const {
  return {scratch_memory_.as<std::byte>() + scratch_size_ * size(thread)};
}

std::span<const float> Plan::logits() const {
  return {logits_.as<float>(), size(num_logits_) * size(config_.vocab_size)};
}

}  // namespace loadproof
