// Asynchronous calls, as Python holds them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "lane.hpp"
#include "mailbox.hpp"
#include "report.hpp"

namespace phalanx {

// An asynchronous call, as Python holds it.
class Pending {
 public:
  virtual ~Pending() = default;
  virtual bool done() = 0;
  virtual std::exception_ptr error() = 0;
  void wait(double timeout) {
    if (origin_.is_here()) return await(timeout);
    // A forked child sees how it had ended by then, and has no threads to bring it to an end.
    if (!done())
      throw Failure(Kind::Backend,
                    title() +
                        " was not done when this process was forked: it is the parent's to "
                        "finish, so a child cannot wait for it");
    if (error()) std::rethrow_exception(error());
  }
  virtual int source() { return -1; }

 private:
  virtual void await(double timeout) = 0;
  virtual std::string title() const = 0;  // "all_reduce at train.py:12"
  const Origin origin_;
};

// For the trace: when a user first waits for what goes on meanwhile.
inline void note_first(std::atomic<int64_t>& place) {
  int64_t none = 0;
  place.compare_exchange_strong(none, now_ns(), std::memory_order_relaxed);
}

class PendingJob : public Pending {
 public:
  PendingJob(nanobind::object engine, std::shared_ptr<Lane> lane, std::shared_ptr<Job> job,
             std::shared_ptr<Board> board, int rank, const Call& call)
      : engine_(std::move(engine)),
        lane_(std::move(lane)),
        job_(std::move(job)),
        board_(std::move(board)),
        rank_(rank),
        op_(call.op),
        site_(call.site),
        awaited_ns_(call.awaited_ns) {}
  bool done() override { return job_->done(); }
  std::exception_ptr error() override { return job_->error(); }
  void await(double timeout) override {
    if (awaited_ns_) note_first(*awaited_ns_);
    if (timeout < 0) lane_->help(*job_);  // a call may take longer than a shorter wait
    Deadline patience = Deadline::in(timeout);
    Waiter waiter(board_->roster(), board_->world_rank(rank_));
    const int64_t started = now_ns();
    while (!job_->wait(std::min(patience.at(), Clock::now() + kSlice))) {
      if (patience.passed()) throw unfinished(timeout);
      WaitFacts facts = wait_facts(op_, board_->name(), name(op_), site_.c_str(), started);
      if (job_->done()) break;
      facts.own = true;
      facts.blocked = timeout < 0;
      waiter.update(facts);
      check_interrupt();
    }
    if (job_->error()) std::rethrow_exception(job_->error());
  }

 private:
  std::string title() const override { return name(op_) + (" at " + site_); }
  Failure unfinished(double timeout) const {
    std::vector<int> behind = board_->ranks_behind(rank_);
    return {Kind::Timeout,
            name(op_) + board_->caption(rank_, site_) + ": not done after a wait of " +
                seconds_text(timeout) + "; it goes on" +
                (behind.empty() ? "" : "\n  not arrived: " + board_->world_ranks(behind)) +
                describe_absent(*board_, behind)};
  }

  nanobind::object engine_;  // kept alive: whoever waits may run the call, on it
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Job> job_;
  std::shared_ptr<Board> board_;
  int rank_;
  Op op_;
  std::string site_;
  std::shared_ptr<std::atomic<int64_t>> awaited_ns_;
};

class PendingDelivery : public Pending {
 public:
  PendingDelivery(std::shared_ptr<Mailbox> mailbox, std::shared_ptr<Delivery> delivery)
      : mailbox_(std::move(mailbox)), delivery_(std::move(delivery)) {}
  bool done() override {
    return delivery_->state.load(std::memory_order_acquire) != Delivery::State::Open;
  }
  std::exception_ptr error() override { return done() ? delivery_->error : nullptr; }
  void await(double timeout) override {
    if (trace::Tap::is_open()) note_first(delivery_->awaited_ns);
    mailbox_->wait(*delivery_, Deadline::in(timeout));
  }
  int source() override { return delivery_->source; }

 private:
  std::string title() const override {
    return name(delivery_->op) + std::string(" at ") + delivery_->site;
  }
  std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<Delivery> delivery_;
};

}  // namespace phalanx
