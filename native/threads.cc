#include "threads.h"

#include <cassert>

#if defined(__linux__)
#include <sched.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace loadproof {
namespace {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Waits for `word` to leave `seen`: a spin for what is about to happen, then turns given to other threads
// (more threads than cores), then sleep.
void await_change(const std::atomic<std::uint32_t>& word, std::uint32_t seen, int spins, int yields) {
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != seen) return;
    pause();
  }
  for (int i = 0; i < yields; ++i) {
    if (word.load(std::memory_order_acquire) != seen) return;
    std::this_thread::yield();
  }
  while (word.load(std::memory_order_acquire) == seen) word.wait(seen, std::memory_order_acquire);
}

// The cores that this process may use, where they are `count`; else none.
std::vector<int> cores_of(int count) {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == count)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(static_cast<std::size_t>(core), &allowed)) cores.push_back(core);
#endif
  static_cast<void>(count);
  return cores;
}

}  // namespace

ThreadPool::ThreadPool(int count) : size_(count), cores_(cores_of(count)) {
  assert(count >= 1);
  try {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { loop(i); });
  } catch (...) {  // no room for another thread: those that run must end before the exception leaves
    join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (owner_.forked())
    for (std::thread& worker : workers_) worker.detach();
  else
    join();
}

void ThreadPool::join() {
  stop_ = true;
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

// A thread that wakes while something else has its core for a moment may be put beside another of its pool.
// Each then waits for the other at every barrier, and the system, which sees two short runs, leaves them
// there.
void ThreadPool::settle(int thread) const {
#if defined(__linux__)
  if (cores_.empty()) return;
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(static_cast<std::size_t>(cores_[static_cast<std::size_t>(thread)]), &own);
  static_cast<void>(sched_setaffinity(0, sizeof own, &own));  // refused, it may cost speed and nothing else
#endif
  static_cast<void>(thread);
}

void ThreadPool::loop(int thread) {
  settle(thread);
  std::uint32_t seen = 0;
  while (true) {
    await_change(region_, seen, 4000, 50);
    ++seen;
    if (stop_) return;
    (*work_)(thread);
    barrier();
  }
}

void ThreadPool::run(const std::function<void(int)>& work) {
  work_ = &work;
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  work(0);
  barrier();
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const std::uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    phase_.notify_all();
    return;
  }
  await_change(phase_, phase, 2000, 1000);
}

}  // namespace loadproof
