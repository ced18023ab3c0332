// Queues of work: the streams of the simulated accelerator.
//
// Work that is added to a stream is not done. It is done when the host waits for it, and with it only what is before it
// on its stream and what these wait for: all other streams stay where they are. So work that should have been waited
// for has not been done yet when it is missed. With a seed, some of it is done earlier, at random.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <utility>
#include <vector>

namespace simulated {

using Work = std::function<void()>;
using StreamKey = int64_t;

// A point in the work of a stream: after so many tasks.
struct Point {
  StreamKey stream = 0;
  uint64_t position = 0;
};

class Queues {
 public:
  void add(StreamKey stream, Work work) {
    Locked locked(*this);
    queues_[stream].tasks.push_back({std::move(work), std::nullopt});
    queues_[stream].num_added++;
    advance_at_random();
  }

  // Lets the work that is added to `stream` from now on wait for `point`.
  void wait(StreamKey stream, Point point) {
    Locked locked(*this);
    queues_[stream].tasks.push_back({nullptr, point});
    queues_[stream].num_added++;
  }

  Point end(StreamKey stream) {
    Locked locked(*this);
    return {stream, queues_[stream].num_added};
  }

  bool reached(Point point) {
    Locked locked(*this);
    return is_done(point);
  }

  // As the host's wait for `point`. Throws the first error of any work so far.
  void run_to(Point point) {
    Locked locked(*this);
    run(point);
    throw_error();
  }

  // As the host's poll: does one task, so that polling comes to an end.
  void run_one(StreamKey stream) {
    Locked locked(*this);
    auto& queue = queues_[stream];
    if (!queue.tasks.empty()) run({stream, queue.num_done + 1});
  }

  void run_all() {
    Locked locked(*this);
    for (bool again = true; again;) {
      again = false;
      for (auto& [stream, queue] : queues_) {
        again = again || !queue.tasks.empty();
        run({stream, queue.num_added});
      }
    }
    throw_error();
  }

  // Calls `work` once all `points` are reached. It must not take long, and must not use the queues.
  void when(std::vector<Point> points, Work work) {
    Locked locked(*this);
    conditional_.push_back({std::move(points), std::move(work)});
  }

  // Calls `work` once no stream has anything to do.
  void when_idle(Work work) {
    Locked locked(*this);
    at_idle_.push_back(std::move(work));
  }

  // 0: nothing is done before somebody waits for it.
  void seed(uint64_t number) {
    Locked locked(*this);
    random_.seed(number);
    is_random_ = number != 0;
  }

 private:
  struct Task {
    Work work;  // nothing: it only waits
    std::optional<Point> after;
  };
  struct Queue {
    std::deque<Task> tasks;
    uint64_t num_added = 0, num_done = 0;
  };
  struct Conditional {
    std::vector<Point> points;
    Work work;
  };

  // What work holds is let go without the lock: that may need Python's, which another thread may have.
  class Locked {
   public:
    explicit Locked(Queues& queues) : queues_(queues), lock_(queues.mutex_) {}
    ~Locked() {
      queues_.settle();
      finished_.swap(queues_.finished_);
    }

   private:
    std::vector<Work> finished_;  // destroyed after the lock is released
    Queues& queues_;
    std::unique_lock<std::mutex> lock_;
  };

  bool is_done(Point point) { return queues_[point.stream].num_done >= point.position; }

  void run(Point point) {
    auto& queue = queues_[point.stream];
    while (queue.num_done < point.position) {
      Task task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      if (task.after) run(*task.after);
      if (task.work) {
        try {
          task.work();
        } catch (...) {
          if (!error_) error_ = std::current_exception();
        }
        finished_.push_back(std::move(task.work));
      }
      queue.num_done++;
    }
  }

  void advance_at_random() {
    if (!is_random_ || queues_.empty()) return;
    for (int times = static_cast<int>(random_() % 3); times > 0; times--) {
      auto chosen = queues_.begin();
      std::advance(chosen, random_() % queues_.size());
      if (!chosen->second.tasks.empty()) run({chosen->first, chosen->second.num_done + 1});
    }
  }

  void settle() {
    for (auto each = conditional_.begin(); each != conditional_.end();) {
      bool is_reached = true;
      for (auto point : each->points) is_reached = is_reached && is_done(point);
      if (is_reached) {
        each->work();
        finished_.push_back(std::move(each->work));
        each = conditional_.erase(each);
      } else {
        ++each;
      }
    }
    for (auto& [stream, queue] : queues_)
      if (!queue.tasks.empty()) return;
    for (auto& work : at_idle_) work();
    at_idle_.clear();
  }

  void throw_error() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  std::mutex mutex_;
  std::map<StreamKey, Queue> queues_;
  std::vector<Conditional> conditional_;
  std::vector<Work> at_idle_, finished_;
  std::exception_ptr error_;
  std::mt19937_64 random_;
  bool is_random_ = false;
};

// Lives as long as the process, because tensors are freed until its very end.
inline Queues& queues() {
  static auto* all = new Queues();
  return *all;
}

}  // namespace simulated
