// Threads that share a loop over thousands of tensors.
//
// The tensors lie scattered and fit into no cache of one core, so that such a loop
// mostly waits for memory. Several cores can wait at the same time.
//
// Who shares a loop holds the GIL, and waits until all of it is done. The others never
// take it, and change no count of references: they read memory that nobody changes in
// the meantime, and write where none of the others does.

#pragma once

#include <ATen/Parallel.h>

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

namespace gradscale {

// So few tensors are looked at sooner than another thread wakes up.
constexpr int64_t FEW = 1000;
constexpr int64_t PIECE = 128;
// More than this many wait for the memory rather than for its delay.
constexpr int MOST_HELPERS = 3;
// How long a helper stays awake: the looks of one step follow each other closely.
constexpr std::chrono::microseconds AWAKE(200);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// As many as PyTorch's own threads leave room for; none where it has one or two.
inline int helpers_allowed() {
  return std::clamp(at::get_num_threads() / 2 - 1, 0, MOST_HELPERS);
}

class Crew {
 public:
  // Runs work(begin, end) for all pieces of 0..count; returns whether none has thrown.
  template <typename Work>
  bool share(int64_t count, int helpers, Work& work) {
    hire(helpers);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = {
          [](void* it, int64_t begin, int64_t end) {
            (*static_cast<Work*>(it))(begin, end);
          },
          &work,
          count};
      next_.store(0, std::memory_order_relaxed);
      failed_.store(false, std::memory_order_relaxed);
      open_ = true;
      rounds_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take(job_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;
    }
    // Those who have come; nobody comes any more.
    for (int turns = 0; inside_.load(std::memory_order_acquire) != 0; turns++) {
      turns < 10000 ? pause() : std::this_thread::yield();
    }
    return !failed_.load(std::memory_order_relaxed);
  }

 private:
  struct Job {
    void (*run)(void*, int64_t, int64_t) = nullptr;
    void* work = nullptr;
    int64_t count = 0;
  };

  void hire(int helpers) {
    if (hired_ >= helpers) {
      return;
    }
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; hired_ < helpers; hired_++) {
        std::thread([this] { help(); }).detach();
      }
    } catch (const std::exception&) {
      // No more threads are to be had: those that are there do the work.
      hired_ = MOST_HELPERS;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void take(const Job& job) {
    while (true) {
      const int64_t begin = next_.fetch_add(PIECE, std::memory_order_relaxed);
      if (begin >= job.count) {
        return;
      }
      try {
        job.run(job.work, begin, std::min(begin + PIECE, job.count));
      } catch (...) {
        failed_.store(true, std::memory_order_relaxed);
      }
    }
  }

  void help() {
    uint64_t seen = 0;
    while (true) {
      stay_awake(seen);
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return rounds_.load() != seen; });
        seen = rounds_.load();
        if (!open_) {
          continue;
        }
        inside_.fetch_add(1, std::memory_order_relaxed);
        job = job_;
      }
      take(job);
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  void stay_awake(uint64_t seen) {
    const auto end = std::chrono::steady_clock::now() + AWAKE;
    while (rounds_.load(std::memory_order_acquire) == seen &&
           std::chrono::steady_clock::now() < end) {
      for (int i = 0; i < 16; i++) {
        pause();
      }
    }
  }

  int hired_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  // Under the mutex: the job, and whether one may still come to help.
  Job job_;
  bool open_ = false;
  std::atomic<uint64_t> rounds_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> inside_{0};
  std::atomic<bool> failed_{false};
};

// Never freed: its threads end with the process. A child that was forked has none of
// them, and makes its own.
inline Crew* crew = nullptr;

// How many there are to be, and from how many tensors on; a test sets both.
inline int helpers_wanted = -1;
inline int64_t fewest = FEW;

inline int helpers_for(int64_t count) {
  if (count < fewest) {
    return 0;
  }
  return helpers_wanted < 0 ? helpers_allowed() : helpers_wanted;
}

inline bool is_shared(int64_t count) {
  return helpers_for(count) > 0;
}

// Runs work(begin, end) for all of 0..count; returns whether nothing was thrown.
template <typename Work>
bool share(int64_t count, Work work) {
  const int helpers = helpers_for(count);
  if (helpers == 0) {
    try {
      work(int64_t(0), count);
    } catch (...) {
      return false;
    }
    return true;
  }
  if (crew == nullptr) {
    static const int handler =
        pthread_atfork(nullptr, nullptr, [] { crew = nullptr; });
    static_cast<void>(handler);
    crew = new Crew();
  }
  return crew->share(count, helpers, work);
}

} // namespace gradscale
