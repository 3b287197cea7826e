// The Python module loadproof._native: packed matrices and plans. See src/loadproof/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "plan.h"
#include "step_queue.h"

namespace nb = nanobind;

namespace loadproof {

void bind_machine(nb::module_& m);
void bind_sample(nb::module_& m);

namespace {

template <class T, int N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

template <class A>
auto span_of(const A& a) {
  return std::span(a.data(), a.size());
}

template <class T>
std::vector<T> copy_of(const Array<T, 1>& a) {
  return {a.data(), a.data() + a.size()};
}

// Starts of concatenated lists: one more than rows, ascending from 0 to the lists' total.
void check_starts(const Array<std::int32_t, 1>& starts, std::size_t rows, std::size_t total) {
  const bool sized = starts.size() == rows + 1 && starts(0) == 0;
  bool ascending = sized && static_cast<std::size_t>(starts(rows)) == total;
  for (std::size_t i = 0; ascending && i < rows; ++i) ascending = starts(i) <= starts(i + 1);
  if (!ascending) throw std::invalid_argument("sampling list starts must ascend from 0 to the list's length");
}

template <class T>
void check_rows(const Array<T, 1>& a, std::size_t rows) {
  if (a.size() != rows) throw std::invalid_argument("sampling arrays must have one entry a logits row");
}

// Room for what sampled and scored rows give: both point into the lists beside them, one after the other.
void reserve_results(QueuedStep& step) {
  std::size_t total = 0;
  for (const SampleParams& p : step.params) total += static_cast<std::size_t>(std::max(p.num_logprobs, 0));
  for (const std::int32_t tops : step.score_tops) total += static_cast<std::size_t>(std::max(tops, 0));
  step.top_ids.resize(total);
  step.top_logprobs.resize(total);
  std::size_t at = 0;
  const auto result = [&](std::int32_t token, std::int32_t tops) {
    const SampleResult found = {token, 0.0f, 0, step.top_ids.data() + at, step.top_logprobs.data() + at};
    at += static_cast<std::size_t>(std::max(tops, 0));
    return found;
  };
  for (const SampleParams& p : step.params) step.results.push_back(result(0, p.num_logprobs));
  for (std::size_t i = 0; i < step.score_tops.size(); ++i)
    step.scores.push_back(result(step.score_targets[i], step.score_tops[i]));
}

template <class T>
nb::ndarray<nb::numpy, T> own(std::vector<T> values, std::vector<std::size_t> shape) {
  auto* held = new std::vector<T>(std::move(values));
  nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(held->data(), shape.size(), shape.data(), owner);
}

std::uint64_t submit(StepQueue& queue, Array<std::int32_t, 1> token_ids, Array<std::int32_t, 1> query_starts,
                     Array<std::int32_t, 1> seq_lens, Array<std::int32_t, 2> block_tables,
                     Array<std::int32_t, 1> logits_rows, Array<std::int32_t, 1> carried_rows,
                     Array<std::int32_t, 1> carried_slots, Array<std::int32_t, 1> sample_slots,
                     Array<float, 1> temperature, Array<std::int32_t, 1> top_k, Array<float, 1> top_p,
                     Array<float, 1> min_p, Array<float, 1> repetition_penalty,
                     Array<float, 1> presence_penalty, Array<float, 1> frequency_penalty,
                     Array<std::uint64_t, 1> seeds, Array<std::int64_t, 1> positions,
                     Array<std::int32_t, 1> history, Array<std::int32_t, 1> history_starts,
                     Array<std::int32_t, 1> num_prompt, Array<std::int32_t, 1> bias_ids,
                     Array<float, 1> bias_values, Array<std::int32_t, 1> bias_starts,
                     Array<std::int32_t, 1> num_logprobs, Array<std::int32_t, 1> hidden_rows,
                     Array<std::int32_t, 1> score_targets, Array<std::int32_t, 1> score_tops,
                     bool return_logits) {
  const std::size_t rows = logits_rows.size();
  for (const auto* a :
       {&temperature, &top_p, &min_p, &repetition_penalty, &presence_penalty, &frequency_penalty})
    check_rows(*a, rows);
  for (const auto* a : {&top_k, &num_prompt, &num_logprobs}) check_rows(*a, rows);
  check_rows(seeds, rows);
  check_rows(positions, rows);
  check_starts(history_starts, rows, history.size());
  check_starts(bias_starts, rows, bias_ids.size());
  require(bias_values.size() == bias_ids.size(), "a bias needs one value an id");
  for (std::size_t i = 0; i < rows; ++i)
    require(num_logprobs(i) <= queue.config().vocab_size, "more logprobs than the vocabulary has tokens");
  for (const std::int32_t tops : span_of(score_tops))
    require(tops <= queue.config().vocab_size, "a score wants more tokens than the vocabulary has");
  require(score_targets.size() == score_tops.size(), "scores need one row, one token and one count each");
  QueuedStep step;
  step.token_ids = copy_of(token_ids);
  step.query_starts = copy_of(query_starts);
  step.seq_lens = copy_of(seq_lens);
  step.block_tables.assign(block_tables.data(), block_tables.data() + block_tables.size());
  step.max_blocks = static_cast<int>(block_tables.shape(1));
  step.logits_rows = copy_of(logits_rows);
  step.carried_rows = copy_of(carried_rows);
  step.carried_slots = copy_of(carried_slots);
  step.sample_slots = copy_of(sample_slots);
  step.history = copy_of(history);
  step.bias_ids = copy_of(bias_ids);
  step.bias_values = copy_of(bias_values);
  step.hidden_rows = copy_of(hidden_rows);
  step.score_targets = copy_of(score_targets);
  step.score_tops = copy_of(score_tops);
  step.return_logits = return_logits;
  for (std::size_t i = 0; i < rows; ++i)
    step.params.push_back({temperature(i), top_k(i), top_p(i), min_p(i), repetition_penalty(i),
                           presence_penalty(i), frequency_penalty(i), seeds(i), positions(i),
                           step.history.data() + history_starts(i), history_starts(i + 1) - history_starts(i),
                           num_prompt(i), step.bias_ids.data() + bias_starts(i),
                           step.bias_values.data() + bias_starts(i), bias_starts(i + 1) - bias_starts(i),
                           num_logprobs(i), queue.config().logprobs_mode});
  reserve_results(step);
  return queue.submit(std::move(step));
}

nb::tuple wait(StepQueue& queue, std::uint64_t number) {
  QueuedStep step;
  {
    nb::gil_scoped_release released;
    step = queue.wait(number);
  }
  const std::size_t rows = step.results.size(), tops = step.top_ids.size();
  const std::size_t described = rows + step.scores.size();
  const auto vocab = static_cast<std::size_t>(queue.config().vocab_size);
  std::vector<std::int32_t> tokens, ranks;  // ranks and logprobs: of sampled rows, then of scored ones
  std::vector<float> logprobs;
  for (const SampleResult& r : step.results) tokens.push_back(r.token);
  for (const auto* found : {&step.results, &step.scores})
    for (const SampleResult& r : *found) {
      ranks.push_back(r.token_rank);
      logprobs.push_back(r.token_logprob);
    }
  nb::object logits = nb::none();
  if (step.return_logits) logits = nb::cast(own(std::move(step.logits), {rows, vocab}));
  return nb::make_tuple(own(std::move(tokens), {rows}), own(std::move(logprobs), {described}),
                        own(std::move(ranks), {described}), own(std::move(step.top_ids), {tops}),
                        own(std::move(step.top_logprobs), {tops}), logits);
}

AttentionShape shape_of(int num_heads, int num_kv_heads, int head_dim) {
  return {num_heads, num_kv_heads, head_dim};
}

// An array of another type is refused: converting it would cut numbers to fit.
auto exact(const char* name) { return nb::arg(name).noconvert(); }

void bind_plan(nb::module_& m) {
  nb::enum_<Buffer>(m, "Buffer")
      .value("RESIDUAL", Buffer::kResidual)
      .value("NORMED", Buffer::kNormed)
      .value("QKV", Buffer::kQkv)
      .value("ATTENDED", Buffer::kAttended)
      .value("GATED", Buffer::kGated)
      .value("PROJECTED", Buffer::kProjected);
  nb::enum_<NormOutput>(m, "NormOutput")
      .value("BF16", NormOutput::kBf16)
      .value("FLOAT", NormOutput::kFloat)
      .value("ADD", NormOutput::kAdd);
  nb::enum_<Epilogue>(m, "Epilogue")
      .value("STORE", Epilogue::kStore)
      .value("ADD", Epilogue::kAdd)
      .value("GATED", Epilogue::kGated);
  nb::enum_<LogprobsMode>(m, "LogprobsMode")
      .value("RAW_LOGPROBS", LogprobsMode::kRawLogprobs)
      .value("RAW_LOGITS", LogprobsMode::kRawLogits)
      .value("PROCESSED_LOGPROBS", LogprobsMode::kProcessedLogprobs)
      .value("PROCESSED_LOGITS", LogprobsMode::kProcessedLogits);
  nb::enum_<Gate>(m, "Gate")
      .value("SILU", Gate::kSilu)
      .value("GELU", Gate::kGelu)
      .value("GELU_TANH", Gate::kGeluTanh);
  nb::class_<RopeTable>(m, "RopeTable")
      .def("__init__", [](RopeTable* self, Array<float, 2> cos, Array<float, 2> sin) {
        new (self) RopeTable{{cos.data(), cos.data() + cos.size()}, {sin.data(), sin.data() + sin.size()}};
      });
  nb::class_<Plan>(m, "Plan")
      .def(
          "__init__",
          [](Plan* self, const std::string& isa, int num_threads, int hidden_size, int vocab_size,
             int max_num_batched_tokens, int max_num_seqs, int max_model_len, int block_size, int num_blocks,
             LogprobsMode logprobs_mode, bool keeps_hidden) {
            new (self) Plan({isa, num_threads, hidden_size, vocab_size, max_num_batched_tokens, max_num_seqs,
                             max_model_len, block_size, num_blocks, logprobs_mode, keeps_hidden});
          },
          nb::arg("isa"), nb::arg("num_threads"), nb::arg("hidden_size"), nb::arg("vocab_size"),
          nb::arg("max_num_batched_tokens"), nb::arg("max_num_seqs"), nb::arg("max_model_len"),
          nb::arg("block_size"), nb::arg("num_blocks"), nb::kw_only(),
          nb::arg("logprobs_mode") = LogprobsMode::kRawLogprobs, nb::arg("keeps_hidden") = true)
      .def("set_embedding", &Plan::set_embedding)
      .def("add_norm",
           [](Plan& plan, Buffer from, Buffer to, NormOutput output, Array<float, 1> weight, float eps,
              float offset) { plan.add(NormStep{from, to, output, copy_of(weight), eps, offset}); })
      .def("add_linear",
           [](Plan& plan, Buffer from, Buffer to, std::shared_ptr<Matrix> weight, Array<float, 1> bias,
              int out_columns, Epilogue epilogue, Gate gate) {
             plan.add(LinearStep{from, to, std::move(weight), copy_of(bias), out_columns, epilogue, gate});
           })
      .def(
          "add_qkv",
          [](Plan& plan, int layer, int num_heads, int num_kv_heads, int head_dim, Array<float, 1> q_norm,
             Array<float, 1> k_norm, float norm_eps, float norm_offset, std::shared_ptr<RopeTable> rope) {
            plan.add(QkvStep{shape_of(num_heads, num_kv_heads, head_dim), layer, copy_of(q_norm),
                             copy_of(k_norm), norm_eps, norm_offset, std::move(rope)});
          },
          nb::arg("layer"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("norm_eps"), nb::arg("norm_offset"),
          nb::arg("rope").none())
      .def("add_attention",
           [](Plan& plan, int layer, int num_heads, int num_kv_heads, int head_dim, float scale,
              float softcap, int window) {
             plan.add(
                 AttentionStep{shape_of(num_heads, num_kv_heads, head_dim), layer, scale, softcap, window});
           })
      .def("set_output",
           [](Plan& plan, Array<float, 1> norm_weight, float eps, float offset,
              std::shared_ptr<Matrix> weight, float softcap) {
             plan.set_output(
                 {Buffer::kResidual, Buffer::kNormed, NormOutput::kBf16, copy_of(norm_weight), eps, offset},
                 std::move(weight), softcap);
           })
      .def_prop_ro("cache_bytes", &Plan::cache_bytes);
  // The plan outlives the queue that runs it.
  nb::class_<StepQueue>(m, "StepQueue")
      .def(nb::init<Plan&>(), nb::keep_alive<1, 2>())
      .def("submit", &submit, exact("token_ids"), exact("query_starts"), exact("seq_lens"),
           exact("block_tables"), exact("logits_rows"), exact("carried_rows"), exact("carried_slots"),
           exact("sample_slots"), exact("temperature"), exact("top_k"), exact("top_p"), exact("min_p"),
           exact("repetition_penalty"), exact("presence_penalty"), exact("frequency_penalty"), exact("seeds"),
           exact("positions"), exact("history"), exact("history_starts"), exact("num_prompt"),
           exact("bias_ids"), exact("bias_values"), exact("bias_starts"), exact("num_logprobs"),
           exact("hidden_rows"), exact("score_targets"), exact("score_tops"), nb::arg("return_logits"))
      .def("wait", &wait, nb::arg("number"));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels, plans and sampling; the typed view is in _native.pyi.";
  m.attr("KERNEL_VERSION") = 1;
  m.def("available_levels", [] {
    std::vector<std::string> names;
    for (const char* const* name = available_levels(); *name; ++name) names.emplace_back(*name);
    return names;
  });
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__",
           [](Matrix* self, int columns, int k) {
             constexpr int most = 1 << 30;
             if (columns < 1 || k < 1 || columns > most || k > most)
               throw std::invalid_argument("a matrix has from 1 to 2**30 rows and columns");
             new (self) Matrix(columns, k);
           })
      .def("pack", [](Matrix& matrix,
                      nb::ndarray<const std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> rows,
                      int first, int panel_step, int panel_offset) {
        if (rows.shape(1) != static_cast<std::size_t>(matrix.k()))
          throw std::invalid_argument("pack: rows of another length than the matrix's k");
        nb::gil_scoped_release released;
        matrix.pack({rows.data(), rows.size()}, static_cast<int>(rows.shape(0)), first, panel_step,
                    panel_offset);
      });
  bind_plan(m);
  bind_machine(m);
  bind_sample(m);
}

}  // namespace loadproof
