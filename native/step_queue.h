// Steps submitted ahead of their results: one thread runs them in order, so that the next can wait for
// nothing but its turn, and a token that is sampled in one is the next one's input without the host in
// between.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "batch.h"
#include "plan.h"
#include "sample.h"
#include "threads.h"

namespace loadproof {

// A step's arrays, and its results once it has run. Everything is the step's own: `params` and `results`
// point into the lists beside them, which no longer change their size.
struct QueuedStep {
  std::vector<std::int32_t> token_ids;     // [T]
  std::vector<std::int32_t> query_starts;  // [S + 1]
  std::vector<std::int32_t> seq_lens;      // [S]
  std::vector<std::int32_t> block_tables;  // [S, max_blocks]
  std::vector<std::int32_t> logits_rows;   // [R]
  int max_blocks = 0;
  std::vector<std::int32_t> carried_rows;   // [C] ascending; rows whose token the preceding step samples
  std::vector<std::int32_t> carried_slots;  // [C]; and the slot that it is left in
  std::vector<std::int32_t> sample_slots;   // [R], distinct, or empty: where sampled tokens are left
  std::vector<SampleParams> params;         // [R]
  std::vector<std::int32_t> history;        // of all rows that have one
  std::vector<std::int32_t> bias_ids;
  std::vector<float> bias_values;
  std::vector<std::int32_t> hidden_rows, score_targets, score_tops;  // [N]
  bool return_logits = false;

  std::vector<SampleResult> results;  // [R]
  std::vector<SampleResult> scores;   // [N]
  std::vector<std::int32_t> top_ids;
  std::vector<float> top_logprobs;
  std::vector<float> logits;  // [R, vocab_size] where asked for
  std::exception_ptr error;

  Batch batch() const {
    return {token_ids,  query_starts, seq_lens,      block_tables, logits_rows,
            max_blocks, hidden_rows,  score_targets, score_tops};
  }
};

// Runs the steps of one plan, which it borrows. Any thread may submit and wait.
class StepQueue {
 public:
  // Throws std::system_error where the system gives no thread.
  explicit StepQueue(Plan& plan);
  // Runs what was submitted to its end.
  ~StepQueue();
  StepQueue(const StepQueue&) = delete;
  StepQueue& operator=(const StepQueue&) = delete;

  // Queues a step and returns its number. Throws std::invalid_argument for a malformed step, of which nothing
  // is kept: also where a row carries over a token that the step before it does not sample. Throws
  // std::runtime_error in a forked process, which has none of the threads.
  std::uint64_t submit(QueuedStep step);

  const PlanConfig& config() const { return plan_.config(); }

  // Waits for a step that was submitted, once, and returns it. Rethrows what its run threw.
  QueuedStep wait(std::uint64_t number);

 private:
  void loop();
  void run(QueuedStep& step);
  void check_carried(const QueuedStep& step) const;

  Plan& plan_;
  const OwnerProcess owner_;
  std::vector<std::int32_t> last_tokens_;  // [max_num_seqs]; by slot; the running thread's
  bool failed_ = false;                    // whether the last step run did; the running thread's

  // On the heap, to be left there by a fork: it cannot end what a thread that it lacks was waiting on.
  struct Signals {
    std::mutex mutex;  // guards what follows here
    std::condition_variable submitted, finished;
  };
  std::unique_ptr<Signals> signals_ = std::make_unique<Signals>();
  std::vector<bool> produced_;  // [max_num_seqs]; slots that the newest step samples into
  std::uint64_t next_ = 0;
  bool stop_ = false;
  std::deque<std::pair<std::uint64_t, QueuedStep>> waiting_;
  std::unordered_map<std::uint64_t, QueuedStep> done_;
  std::uint64_t num_done_ = 0;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace loadproof
