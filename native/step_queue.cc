#include "step_queue.h"

#include <cassert>
#include <stdexcept>
#include <utility>

#include "layout.h"

namespace loadproof {
StepQueue::StepQueue(Plan& plan)
    : plan_(plan),
      last_tokens_(size(plan.config().max_num_seqs)),
      produced_(size(plan.config().max_num_seqs)),
      thread_([this] { loop(); }) {}

StepQueue::~StepQueue() {
  if (owner_.forked()) {  // the thread is not in this process
    thread_.detach();
    static_cast<void>(signals_.release());
    return;
  }
  {
    const std::lock_guard lock(signals_->mutex);
    stop_ = true;
  }
  signals_->submitted.notify_all();
  thread_.join();
}

std::uint64_t StepQueue::submit(QueuedStep step) {
  if (owner_.forked())
    throw std::runtime_error("the device was made before a fork and runs in the parent only");
  plan_.check(step.batch(), step.params);
  const std::lock_guard lock(signals_->mutex);
  check_carried(step);
  produced_.assign(produced_.size(), false);
  for (const std::int32_t slot : step.sample_slots) produced_[size(slot)] = true;
  waiting_.emplace_back(next_, std::move(step));
  signals_->submitted.notify_one();
  return next_++;
}

QueuedStep StepQueue::wait(std::uint64_t number) {
  std::unique_lock lock(signals_->mutex);
  require(number < next_, "no such step was submitted");
  signals_->finished.wait(lock, [&] { return num_done_ > number; });
  auto found = done_.extract(number);
  require(!found.empty(), "a step can be waited for once");
  if (found.mapped().error) std::rethrow_exception(found.mapped().error);
  return std::move(found.mapped());
}

void StepQueue::check_carried(const QueuedStep& step) const {
  const std::size_t slots = produced_.size();
  const auto known = [&](std::int32_t slot) { return slot >= 0 && size(slot) < slots; };
  require(step.carried_slots.size() == step.carried_rows.size(), "a carried row needs one slot");
  std::int32_t before = -1;
  for (std::size_t i = 0; i < step.carried_rows.size(); ++i) {
    const std::int32_t row = step.carried_rows[i], slot = step.carried_slots[i];
    require(row > before && size(row) < step.token_ids.size(), "carried rows must ascend within the step");
    before = row;
    require(known(slot) && produced_[size(slot)],
            "a row carries over a token that the step before it did not sample");
  }
  require(step.sample_slots.empty() || step.sample_slots.size() == step.logits_rows.size(),
          "sample_slots must have one entry a logits row, or none");
  std::vector<bool> used(slots);
  for (const std::int32_t slot : step.sample_slots) {
    require(known(slot) && !used[size(slot)], "sample_slots must be distinct and below max_num_seqs");
    used[size(slot)] = true;
  }
}

void StepQueue::loop() {
  plan_.settle();
  std::unique_lock lock(signals_->mutex);
  while (true) {
    signals_->submitted.wait(lock, [&] { return stop_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    auto [number, step] = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    try {
      run(step);
    } catch (...) {
      step.error = std::current_exception();
    }
    lock.lock();
    assert(number == num_done_);
    done_.emplace(number, std::move(step));
    ++num_done_;
    signals_->finished.notify_all();
  }
}

void StepQueue::run(QueuedStep& step) {
  const bool carries = !step.carried_rows.empty();
  if (std::exchange(failed_, true) && carries)
    throw std::runtime_error("the step before this one failed, and with it a token that this one needs");
  for (std::size_t i = 0; i < step.carried_rows.size(); ++i)
    step.token_ids[size(step.carried_rows[i])] = last_tokens_[size(step.carried_slots[i])];
  // The last known token of a row that is sampled from is the row's own: it may just have been carried over.
  for (std::size_t i = 0; i < step.params.size(); ++i) {
    const SampleParams& p = step.params[i];
    if (p.num_history == 0) continue;
    const auto last = static_cast<std::size_t>(p.history - step.history.data() + p.num_history - 1);
    step.history[last] = step.token_ids[size(step.logits_rows[i])];
  }
  plan_.run(step.batch(), step.params, step.results, step.scores);
  for (std::size_t i = 0; i < step.sample_slots.size(); ++i)
    last_tokens_[size(step.sample_slots[i])] = step.results[i].token;
  if (step.return_logits) {
    const std::span<const float> found = plan_.logits();
    step.logits.assign(found.begin(), found.end());
  }
  failed_ = false;
}

}  // namespace loadproof
