// The pool: one parallel region a step, with barriers inside it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace loadproof {

// The process that threads were started in: a fork has none of them, and must neither wait for nor join them.
class OwnerProcess {
 public:
  bool forked() const { return getpid() != pid_; }

 private:
  const pid_t pid_ = getpid();
};

// `count` threads, the caller's among them, that run one function together. Not reentrant: one region at a
// time. The pool owns its threads and joins them when destroyed.
class ThreadPool {
 public:
  // Throws std::system_error where the system gives no more threads.
  explicit ThreadPool(int count);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Keeps the calling thread, which is to call run() as long as it lives, on a core of its own, as the
  // workers are from their start, where the process may use just as many cores as the pool has threads.
  void settle() const { settle(0); }

  // Calls work(thread) on every thread, 0 being the caller, and returns when all have returned. `work` must
  // not throw.
  void run(const std::function<void(int)>& work);

  // Inside a region: waits until every thread of the pool is here. Writes before it are seen after it.
  void barrier();

 private:
  void loop(int thread);
  void settle(int thread) const;
  void join();

  const int size_;
  const std::vector<int> cores_;  // one a thread, or none
  const OwnerProcess owner_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* work_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<std::uint32_t> region_{0};  // counts regions; workers start on a change
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<std::uint32_t> phase_{0};
};

}  // namespace loadproof
