// Python's view of the sampler alone, one row at a time: for tests and measurements. The plan calls the same
// function of the same table.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "kernels.h"
#include "philox.h"

namespace nb = nanobind;

namespace loadproof {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using Ids = std::optional<Array<std::int32_t>>;
using Floats = std::optional<Array<float>>;
using Sampled = std::tuple<std::int32_t, float, std::int32_t, Result<std::int32_t>, Result<float>>;

constexpr std::size_t kMaxVocab = std::size_t{1} << 24;

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

template <class T>
std::int32_t length_of(const std::optional<Array<T>>& list) {
  require(!list || list->size() <= 0x7fffffff, "a list has at most 2**31 - 1 entries");
  return list ? static_cast<std::int32_t>(list->size()) : 0;
}

template <class T>
const T* data_of(const std::optional<Array<T>>& list) {
  return list ? list->data() : nullptr;
}

void require_ids(const Ids& ids, std::size_t vocab_size, const char* name) {
  for (std::int32_t i = 0; i < length_of(ids); ++i) {
    const std::int32_t id = ids->data()[i];
    if (id < 0 || static_cast<std::size_t>(id) >= vocab_size)
      throw std::invalid_argument(std::string(name) + ": token " + std::to_string(id) +
                                  " is outside a vocabulary of " + std::to_string(vocab_size));
  }
}

// A NumPy array of n elements that owns its memory, and the memory to fill in.
template <class T>
std::pair<Result<T>, T*> new_array(std::size_t n) {
  auto memory = std::make_unique<T[]>(n);
  T* data = memory.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  memory.release();
  return {Result<T>(data, {n}, owner), data};
}

const Kernels& require_level(const std::string& isa) {
  const Kernels* kernels = kernels_for(isa);
  if (!kernels) throw std::invalid_argument("no instruction-set level '" + isa + "' here");
  return *kernels;
}

void require_settings(const SampleParams& p, std::int32_t vocab_size) {
  require(std::isfinite(p.temperature) && p.temperature >= 0.0f, "temperature must be finite and at least 0");
  require(p.top_k >= 0, "top_k must be at least 0");
  require(p.top_p >= 0.0f && p.top_p <= 1.0f, "top_p must be from 0 to 1");
  require(p.min_p >= 0.0f && p.min_p <= 1.0f, "min_p must be from 0 to 1");
  require(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0.0f,
          "repetition_penalty must be finite and above 0");
  require(std::isfinite(p.presence_penalty) && std::isfinite(p.frequency_penalty),
          "penalties must be finite");
  require(p.num_prompt >= 0 && p.num_prompt <= p.num_history, "num_prompt must be within the history");
  require(p.num_logprobs >= -1 && p.num_logprobs <= vocab_size,
          "num_logprobs must be -1 or at most the vocabulary");
  require(p.position >= 0, "position must be at least 0");
}

Sampled sample_row(const Array<float>& logits, const std::string& isa, float temperature, std::int32_t top_k,
                   float top_p, float min_p, float repetition_penalty, float presence_penalty,
                   float frequency_penalty, std::uint64_t seed, std::int64_t position, const Ids& history,
                   std::int32_t num_prompt, const Ids& bias_ids, const Floats& bias_values,
                   std::int32_t num_logprobs, LogprobsMode logprobs_mode, int repeats) {
  const Kernels& kernels = require_level(isa);
  const std::size_t vocab_size = logits.size();
  require(vocab_size > 0 && vocab_size <= kMaxVocab, "a row has from 1 to 2**24 logits");
  require_ids(history, vocab_size, "history");
  require_ids(bias_ids, vocab_size, "bias_ids");
  require(length_of(bias_ids) == length_of(bias_values), "bias_ids and bias_values must have one length");
  const SampleParams params = {
      .temperature = temperature,
      .top_k = top_k,
      .top_p = top_p,
      .min_p = min_p,
      .repetition_penalty = repetition_penalty,
      .presence_penalty = presence_penalty,
      .frequency_penalty = frequency_penalty,
      .seed = seed,
      .position = position,
      .history = data_of(history),
      .num_history = length_of(history),
      .num_prompt = num_prompt,
      .bias_ids = data_of(bias_ids),
      .bias_values = data_of(bias_values),
      .num_bias = length_of(bias_ids),
      .num_logprobs = num_logprobs,
      .logprobs_mode = logprobs_mode,
  };
  require_settings(params, static_cast<std::int32_t>(vocab_size));
  const auto floats = std::make_unique_for_overwrite<float[]>(SampleScratch::num_floats(vocab_size));
  const auto keys = std::make_unique_for_overwrite<std::uint64_t[]>(SampleScratch::num_keys(vocab_size));
  const std::size_t num_top = num_logprobs > 0 ? static_cast<std::size_t>(num_logprobs) : 0;
  auto [top_ids, ids] = new_array<std::int32_t>(num_top);
  auto [top_logprobs, values] = new_array<float>(num_top);
  SampleResult result = {0, 0.0f, 0, ids, values};
  {
    nb::gil_scoped_release released;
    for (int i = 0; i < repeats; ++i)
      kernels.sample_row(logits.data(), static_cast<int>(vocab_size), params, {floats.get(), keys.get()},
                         &result);
  }
  return {result.token, result.token_logprob, result.token_rank, std::move(top_ids), std::move(top_logprobs)};
}

std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t> philox_words(std::uint64_t seed,
                                                                                    std::int64_t position) {
  const PhiloxWords words = philox(seed, static_cast<std::uint64_t>(position));
  return {words.v[0], words.v[1], words.v[2], words.v[3]};
}

}  // namespace

void bind_sample(nb::module_& m);
void bind_sample(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "sample_row", sample_row, "logits"_a.noconvert(), nb::kw_only(), "isa"_a, "temperature"_a = 1.0f,
      "top_k"_a = 0, "top_p"_a = 1.0f, "min_p"_a = 0.0f, "repetition_penalty"_a = 1.0f,
      "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f, "seed"_a = 0, "position"_a = 0,
      "history"_a = nb::none(), "num_prompt"_a = 0, "bias_ids"_a = nb::none(), "bias_values"_a = nb::none(),
      "num_logprobs"_a = -1, "logprobs_mode"_a = LogprobsMode::kRawLogprobs, "repeats"_a = 1,
      "Sample one row: (token, its log-probability, its rank, top ids, top log-probabilities); all but the\n"
      "token mean something only where num_logprobs is not -1. More repeats do the same work again, to be "
      "timed.");
  m.def("philox", philox_words, "seed"_a, "position"_a, "The four random words of a seed and position.");
}

}  // namespace loadproof
