// Sampling one row of logits; see sample.h for the arguments.
//
// Every filter keeps a prefix of one order, logits descending and ties to the lowest id: min-p the tokens of
// at least min_p times the best one's probability, top-k exactly the k first, top-p the fewest whose share of
// what the others left reaches p. So what survives is everything up to one Cut. The cut is found without
// sorting the vocabulary, and the draw is one pass in id order: the first survivor whose cumulative weight
// exceeds a uniform share of the total. That takes one random number a row, where Gumbel noise takes one and
// two logarithms for each token, and needs no sorted order.
//
// All sums run in one fixed structure: sixteen lanes within a block of 256 tokens, then block after block.
//
// A NaN logit counts as minus infinity, plus infinity as the largest float, minus zero as zero. A token at
// minus infinity is taken only when nothing else is left: then the lowest id without a bias of minus
// infinity, or 0 when every token has one.

#include "../philox.h"
#include "sample_order.inl"

namespace loadproof::LOADPROOF_NS {
namespace {
namespace sampling {

constexpr float kGreedyBelow = 1e-5f;

// ---- Adjusted logits

void penalise(float* x, const SampleParams& p, Key* counts) {
  constexpr Key kDone = ~Key{0};
  for (int i = 0; i < p.num_history; ++i) counts[p.history[i]] = 0;
  for (int i = p.num_prompt; i < p.num_history; ++i) ++counts[p.history[i]];
  for (int i = 0; i < p.num_history; ++i) {
    const std::int32_t id = p.history[i];
    const Key count = counts[id];
    if (count == kDone) continue;
    counts[id] = kDone;
    float y = x[id] > 0.0f ? x[id] / p.repetition_penalty : x[id] * p.repetition_penalty;
    y -= p.frequency_penalty * static_cast<float>(count);
    if (count > 0) y -= p.presence_penalty;
    x[id] = y;
  }
}

// The row after penalties and bias: the given one where there are none, else a copy.
const float* adjust(const float* logits, int size, const SampleParams& p, const Workspace& work) {
  const bool penalised =
      p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
  if (!(penalised && p.num_history > 0) && p.num_bias == 0) return logits;
  float* x = work.adjusted;
  __builtin_memcpy(x, logits, static_cast<std::size_t>(size) * sizeof(float));
  if (penalised) penalise(x, p, work.keys);
  for (int i = 0; i < p.num_bias; ++i) x[p.bias_ids[i]] += p.bias_values[i];
  return x;
}

// For a row with nothing above minus infinity.
int first_allowed(int size, const SampleParams& p, float* banned) {
  for (int i = 0; i < size; ++i) banned[i] = 0.0f;
  for (int i = 0; i < p.num_bias; ++i)
    if (p.bias_values[i] == -kInf) banned[p.bias_ids[i]] = 1.0f;
  for (int i = 0; i < size; ++i)
    if (banned[i] == 0.0f) return i;
  return 0;
}

// ---- Weights: probabilities times a constant, the best token's being 1

struct Weigher {
  F16 best;
  F16 inverse_temperature;
  F16 least;  // min-p; smaller weights become 0
  F16 operator()(F16 x) const {
    const F16 w = exp((x - best) * inverse_temperature);
    return if_less(w, least, zero(), w);
  }
  float one(float x) const {
    float lanes[16];
    store(lanes, (*this)(set1(x)));
    return lanes[0];
  }
};

// The last token in order that may be drawn.
struct Cut {
  float logit;
  int id;
};

// Weights of the tokens from id i on, zero after the cut.
inline F16 surviving(F16 x, int i, const Weigher& weigh, Cut cut) {
  const F16 w = weigh(x), logit = set1(cut.logit);
  const F16 id = iota() + set1(static_cast<float>(i));
  const F16 up_to_id = if_less(x, logit, zero(), w);
  const F16 beyond_id = if_less(logit, x, w, zero());
  return if_less(set1(static_cast<float>(cut.id)), id, beyond_id, up_to_id);
}

inline float block_sum(const Row& row, int block, const Weigher& weigh, Cut cut) {
  if (less_bits(load(row.maxima + block * 16), set1(cut.logit)) == 0xffffu) return 0.0f;
  F16 lanes = zero();
  for_block(row, block, [&](int i, int, F16 x) { lanes = lanes + surviving(x, i, weigh, cut); });
  return sum(lanes);
}

// The first of n ordered keys at which the weights, added to `above`, reach the target; the last if none.
Cut reach(const Row& row, const Key* keys, int n, const float* weights, double above, double target) {
  int i = 0;
  for (double reached = above; i < n - 1; ++i) {
    reached += static_cast<double>(weights[id_of(keys[i])]);
    if (reached >= target) break;
  }
  const int id = id_of(keys[i]);
  return {usable(row.logits[id]), id};
}

// Top-p among the k best.
Cut cut_of_best(const Row& row, const Weigher& weigh, int k, float top_p, const Workspace& work) {
  const Key* keys = best_tokens(row, k, work);
  const int last = id_of(keys[k - 1]);
  if (!(top_p < 1.0f)) return {usable(row.logits[last]), last};
  double total = 0.0;
  for (int i = 0; i < k; ++i) {
    const int id = id_of(keys[i]);
    work.weights[id] = weigh.one(usable(row.logits[id]));
    total += static_cast<double>(work.weights[id]);
  }
  return reach(row, keys, k, work.weights, 0.0, static_cast<double>(top_p) * total);
}

// ---- Top-p among all tokens: a band of logits that holds the cut is narrowed until few tokens lie in it

constexpr int kSplits = 8;

struct Band {
  float low, high;  // low <= logit < high
  float above;      // weight of the tokens at `high` and over
};

// Total weight of the tokens at or over each threshold.
void weigh_above(const Row& row, const float* weights, const float* thresholds, float* totals) {
  F16 outer[kSplits] = {};
  for (int block = 0; block < row.num_blocks; ++block) {
    F16 inner[kSplits] = {};
    for_block(row, block, [&](int i, int n, F16 x) {
      const F16 w = load_n(weights + i, n);
      for (int j = 0; j < kSplits; ++j) inner[j] = inner[j] + if_less(x, set1(thresholds[j]), zero(), w);
    });
    for (int j = 0; j < kSplits; ++j) outer[j] = outer[j] + inner[j];
  }
  for (int j = 0; j < kSplits; ++j) totals[j] = sum(outer[j]);
}

// Writes every token's weight; returns their total, summed like weigh_above's so that no part exceeds it.
float weigh_all(const Row& row, const Weigher& weigh, float* weights) {
  F16 outer = zero();
  for (int block = 0; block < row.num_blocks; ++block) {
    F16 inner = zero();
    for_block(row, block, [&](int i, int n, F16 x) {
      const F16 w = weigh(x);
      store_n(weights + i, w, n);
      inner = inner + w;
    });
    outer = outer + inner;
  }
  return sum(outer);
}

// Falling thresholds: at first where the best tokens of a language model lie, in temperatures below the best
// one, then evenly through the band. Weights are 0 from 88 temperatures on.
void split(const Band& band, float best, float temperature, float* thresholds) {
  constexpr float kFirst[kSplits] = {1, 2, 3, 4, 5, 6, 8, 12};
  const float high = band.high < best ? band.high : best;
  const float end = best - 88.0f * temperature;
  const float low = band.low > end ? band.low : end;
  for (int j = 0; j < kSplits; ++j)
    thresholds[j] = band.low == -kInf && band.high == kInf
                        ? best - kFirst[j] * temperature
                        : high - (high - low) * (static_cast<float>(j + 1) / (kSplits + 1));
}

// The part of the band that holds the cut; `few` tells whether its tokens are few enough to sort.
Band narrow(const Weigher& weigh, Band band, const float* thresholds, const float* totals, double target,
            bool* few) {
  constexpr float kFew = 1024.0f;
  int j = 0;
  while (j < kSplits && static_cast<double>(totals[j]) < target) ++j;
  const float low = j < kSplits ? thresholds[j] : band.low;
  const float high = j > 0 ? thresholds[j - 1] : band.high;
  const float above = j > 0 ? totals[j - 1] : band.above;
  // Each token in the band weighs at least what one at its bottom does.
  *few = j < kSplits && totals[j] - above < kFew * weigh.one(low);
  return {low, high, above};
}

Cut cut_of_all(const Row& row, const Weigher& weigh, float top_p, float temperature, const Workspace& work) {
  const double target = static_cast<double>(top_p) * static_cast<double>(weigh_all(row, weigh, work.weights));
  Band band = {-kInf, kInf, 0.0f};
  bool few = false;
  for (int pass = 0; pass < 4 && !few; ++pass) {
    float thresholds[kSplits], totals[kSplits];
    split(band, row.best, temperature, thresholds);
    weigh_above(row, work.weights, thresholds, totals);
    band = narrow(weigh, band, thresholds, totals, target, &few);
  }
  const int n = gather(row, band.low, band.high, work.keys);
  const Key* keys = sort(work.keys, n, work.spare);
  return reach(row, keys, n, work.weights, static_cast<double>(band.above), target);
}

// ---- The draw

inline double uniform(std::uint64_t seed, std::int64_t position) {
  const PhiloxWords words = philox(seed, static_cast<std::uint64_t>(position));
  const std::uint64_t bits = static_cast<std::uint64_t>(words.v[0]) << 32 | words.v[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

int draw(const Row& row, const Weigher& weigh, Cut cut, double share, float* sums) {
  double total = 0.0;
  for (int block = 0; block < row.num_blocks; ++block) {
    sums[block] = block_sum(row, block, weigh, cut);
    total += static_cast<double>(sums[block]);
  }
  const double target = share * total;
  double before = 0.0, after = 0.0;
  int chosen = 0;
  for (int block = 0; block < row.num_blocks && after <= target; ++block) {
    if (sums[block] == 0.0f) continue;
    chosen = block;
    before = after;
    after += static_cast<double>(sums[block]);
  }
  float weights[kBlock] = {};
  for_block(row, chosen, [&](int i, int n, F16 x) {
    store_n(weights + (i - chosen * kBlock), surviving(x, i, weigh, cut), n);
  });
  // One by one the weights may round to less than their block's sum: then its last survivor is meant.
  int last = 0;
  double reached = before;
  for (int i = 0; i < kBlock && reached <= target; ++i) {
    if (weights[i] == 0.0f) continue;
    last = i;
    reached += static_cast<double>(weights[i]);
  }
  return chosen * kBlock + last;
}

Weigher weigher_of(const Row& row, const SampleParams& p) {
  const float least = p.min_p < 1.0f ? p.min_p : 1.0f;
  return {set1(row.best), set1(1.0f / p.temperature), set1(least)};
}

Cut cut_of(const Row& row, const Weigher& weigh, const SampleParams& p, const Workspace& work) {
  if (p.top_k > 0 && p.top_k < row.size) return cut_of_best(row, weigh, p.top_k, p.top_p, work);
  if (p.top_p < 1.0f) return cut_of_all(row, weigh, p.top_p, p.temperature, work);
  return {-kInf, row.size};
}

// The logits that a draw is from, in place of the weights.
const float* processed(const Row& row, const Weigher& weigh, Cut cut, float* out) {
  const F16 logit = set1(cut.logit), last = set1(static_cast<float>(cut.id)), none = set1(-kInf);
  for (int block = 0; block < row.num_blocks; ++block)
    for_block(row, block, [&](int i, int n, F16 x) {
      const F16 drawn = if_less(exp((x - weigh.best) * weigh.inverse_temperature), weigh.least, none,
                                x * weigh.inverse_temperature);
      const F16 up_to_id = if_less(x, logit, none, drawn), beyond_id = if_less(logit, x, drawn, none);
      store_n(out + i, if_less(last, iota() + set1(static_cast<float>(i)), beyond_id, up_to_id), n);
    });
  return out;
}

// ---- Log-probabilities

// ln x for x >= 1: with x = m 2**e and m near 1, ln m = 2 atanh((m - 1) / (m + 1)), the series to the 21st
// power.
double natural_log(double x) {
  std::uint64_t u;
  __builtin_memcpy(&u, &x, 8);
  int e = static_cast<int>(u >> 52) - 1023;
  u = (u & 0xfffffffffffffu) | 0x3ff0000000000000u;
  double m;
  __builtin_memcpy(&m, &u, 8);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++e;
  }
  const double z = (m - 1.0) / (m + 1.0);
  double series = 0.0;
  for (int i = 21; i > 0; i -= 2) series = series * (z * z) + 1.0 / i;
  return 2.0 * z * series + e * 0.6931471805599453;
}

int rank_of(const Row& row, float logit) {
  const F16 x = set1(logit);
  int rank = 1;
  for (int block = 0; block < row.num_blocks; ++block) {
    if (!less_bits(x, load(row.maxima + block * 16))) continue;
    for_block(row, block, [&](int, int, F16 y) { rank += __builtin_popcount(less_bits(x, y)); });
  }
  return rank;
}

void describe(const Row& row, int num_logprobs, LogprobsMode mode, const Workspace& work,
              SampleResult* result) {
  const bool as_logits = mode == LogprobsMode::kRawLogits || mode == LogprobsMode::kProcessedLogits;
  const Weigher weigh = {set1(row.best), set1(1.0f), zero()};
  double total = 0.0;
  for (int block = 0; block < row.num_blocks; ++block)
    total += static_cast<double>(block_sum(row, block, weigh, {-kInf, row.size}));
  const double shift = natural_log(total);
  const auto logprob = [&](int id) {
    const float x = usable(row.logits[id]);
    if (as_logits) return x;
    const double value = static_cast<double>(x) - static_cast<double>(row.best) - shift;
    if (x == -kInf) return -kInf;
    return value < -static_cast<double>(kLargest) ? -kLargest : static_cast<float>(value);
  };
  result->token_logprob = logprob(result->token);
  result->token_rank = rank_of(row, usable(row.logits[result->token]));
  const int k = smaller(num_logprobs, row.size);
  if (k <= 0) return;
  const Key* keys = best_tokens(row, k, work);
  for (int i = 0; i < k; ++i) {
    result->top_ids[i] = id_of(keys[i]);
    result->top_logprobs[i] = logprob(id_of(keys[i]));
  }
}

}  // namespace sampling

// Ids are compared as floats, so vocab_size is at most 2**24.
void sample_row(const float* logits, int vocab_size, const SampleParams& p, const SampleScratch& scratch,
                SampleResult* result) {
  using namespace sampling;
  const Workspace work = divide(scratch, vocab_size);
  const float* adjusted = adjust(logits, vocab_size, p, work);
  const Row row = scan(adjusted, vocab_size, work.maxima);
  const bool draws = row.best > -kInf && p.temperature >= kGreedyBelow;
  const Weigher weigh = draws ? weigher_of(row, p) : Weigher{};
  const Cut cut = draws ? cut_of(row, weigh, p, work) : Cut{};
  if (draws)
    result->token = draw(row, weigh, cut, uniform(p.seed, p.position), work.sums);
  else
    result->token = row.best > -kInf ? first_best(row) : first_allowed(vocab_size, p, work.weights);
  if (p.num_logprobs < 0) return;
  const bool raw =
      p.logprobs_mode == LogprobsMode::kRawLogprobs || p.logprobs_mode == LogprobsMode::kRawLogits;
  const float* described = raw ? logits : draws ? processed(row, weigh, cut, work.weights) : adjusted;
  describe(described == adjusted ? row : scan(described, vocab_size, work.maxima), p.num_logprobs,
           p.logprobs_mode, work, result);
}

// The log-probabilities of a row whose token is known: `result->token`, within the vocabulary. Nothing is
// sampled from it, so processed ones are the raw ones.
void score_row(const float* logits, int vocab_size, int num_logprobs, LogprobsMode mode,
               const SampleScratch& scratch, SampleResult* result) {
  using namespace sampling;
  const Workspace work = divide(scratch, vocab_size);
  describe(scan(logits, vocab_size, work.maxima), num_logprobs, mode, work, result);
}

}  // namespace
}  // namespace loadproof::LOADPROOF_NS
