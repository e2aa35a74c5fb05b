// Operations that are given up, and waits that cannot end.
#include <random>

#include "ranks.hpp"

using namespace phalanx;

namespace {

std::optional<Kind> failure_of(const std::function<void()>& body) {
  try {
    body();
    return std::nullopt;
  } catch (const Failure& failure) {
    return failure.kind;
  }
}

void barrier(Rank& self, double timeout = -1) {
  Call call;
  call.op = Op::Barrier;
  call.timeout = timeout;
  self.group.run(call);
}

std::shared_ptr<Delivery> message(Rank& self, Op op, int peer, std::vector<float>& values) {
  auto delivery =
      std::make_shared<Delivery>(op, peer, 0, DType::F32, view(values), -1, self.group.timeout);
  self.mailbox.start(delivery, false);
  return delivery;
}

void wait_for(Rank& self, Delivery& delivery) { self.mailbox.wait(delivery, delivery.deadline); }

}  // namespace

// Whether a meeting took place or was given up, all ranks say the same of it.
TEST(ranks_agree_on_what_was_given_up) {
  on_both([](Rank& self) {
    constexpr int kRounds = 150;
    std::mt19937 random(uint32_t(self.id() + 1));
    std::vector<float> given_up(kRounds);
    for (int round = 0; round < kRounds; ++round) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));
      auto kind = failure_of([&] { barrier(self, random() % 4 ? 0.0002 : 5); });
      CHECK(!kind || kind == Kind::Timeout);
      given_up[round] = kind ? 1 : 0;
    }
    auto sum = given_up;
    Call call;
    call.op = Op::AllReduce;
    call.inputs = call.outputs = {view(sum)};
    call.dtype = DType::F32;
    self.group.run(call);
    for (int round = 0; round < kRounds; ++round)
      CHECK(sum[round] == given_up[round] * float(self.size()));
  });
}

// Rank 0 sleeps through a row of meetings that the others give up, all at the same time. No rank
// has a core here, so the board is a crowded one.
TEST(no_meeting_is_lost_from_a_row_that_is_given_up) {
  constexpr uint64_t kMeetings = 100'000;
  constexpr int kRanks = 4;
  auto board = Board::create(Roster::create(kRanks, true), all_ranks(kRanks), "world", "");
  REQUIRE(board->crowded());
  std::vector<std::thread> others;
  for (int rank = 1; rank < kRanks; ++rank)
    others.emplace_back([&, rank] {
      for (uint64_t clock = 1; clock <= kMeetings; ++clock) {
        Posting& posting = board->posting(rank, clock);
        const auto arrival = board->count_arrival(clock);
        CHECK(arrival == Board::Arrival::TooLate ||
              board->give_up(rank, clock, posting, Progress::TimedOut));
        CHECK(board->is_given_up(clock) && board->is_given_up(1));
      }
    });
  for (auto& other : others) other.join();
  for (uint64_t clock = 1; clock <= kMeetings; ++clock) CHECK(board->is_given_up(clock));
  CHECK(!board->is_given_up(kMeetings + 1));
}

TEST(crossed_receives_are_a_deadlock) {
  for (auto on : {on_threads, on_processes})
    on(3, [](Rank& self) {
      std::vector<float> values(4);
      auto recv = message(self, Op::Recv, (self.id() + 1) % 3, values);
      CHECK(failure_of([&] { wait_for(self, *recv); }) == Kind::Deadlock);
      barrier(self);
    });
}

TEST(a_collective_and_a_receive_are_a_deadlock) {
  for (auto on : {on_threads, on_processes})
    on(2, [](Rank& self) {
      std::vector<float> values(4);
      if (self.id() == 0) {
        CHECK(failure_of([&] { barrier(self); }) == Kind::Deadlock);
      } else {
        auto recv = message(self, Op::Recv, 0, values);
        CHECK(failure_of([&] { wait_for(self, *recv); }) == Kind::Deadlock);
        std::this_thread::sleep_for(10 * kSlice);  // the other is told as well
        CHECK(failure_of([&] { barrier(self); }) == Kind::Deadlock);
      }
      barrier(self);
    });
}

TEST(who_comes_late_is_not_in_a_deadlock) {
  for (auto on : {on_threads, on_processes})
    on(3, [](Rank& self) {
      std::vector<float> values(100'000);
      for (int round = 0; round < 3; ++round) {
        if (self.id() == 2) {
          std::this_thread::sleep_for(std::chrono::milliseconds(400));
          wait_for(self, *message(self, Op::Send, 0, values));
        } else if (self.id() == 0) {
          wait_for(self, *message(self, Op::Recv, 2, values));
        }
        barrier(self);
      }
    });
}
