// The engine end to end, with ranks as threads and as forked processes. The same programs run on
// both, so that the sanitizers see every path.
#include <cstring>

#include "lane.hpp"
#include "ranks.hpp"

using namespace phalanx;

namespace {

const size_t kCounts[] = {0, 1, 12, 13, 1000, 5000, 100'003};

void run(Rank& self, Call& call) {
  call.dtype = DType::F32;
  self.group.run(call);
}

}  // namespace

TEST(reductions) {
  on_both([](Rank& self) {
    const int p = self.size();
    for (size_t count : kCounts) {
      std::vector<float> values(count);
      for (size_t i = 0; i < count; ++i) values[i] = float(i % 100 + self.id());
      auto expected = [&](size_t i) { return float(int(i % 100) * p + p * (p - 1) / 2); };
      {
        auto mine = values;
        Call call;
        call.op = Op::AllReduce;
        call.inputs = call.outputs = {view(mine)};
        run(self, call);
        for (size_t i = 0; i < count; ++i) CHECK(mine[i] == expected(i));
      }
      {
        auto mine = values;
        Call call;
        call.op = Op::Reduce;
        call.root = p - 1;
        call.inputs = {view(mine)};
        if (self.id() == call.root) call.outputs = call.inputs;
        run(self, call);
        for (size_t i = 0; i < count; ++i)
          CHECK(mine[i] == (self.id() == p - 1 ? expected(i) : values[i]));
      }
      {
        std::vector<std::vector<float>> inputs(p, values);
        std::vector<float> out(count, -1);
        Call call;
        call.op = Op::ReduceScatter;
        for (auto& input : inputs) call.inputs.push_back(view(input));
        call.outputs = {view(out)};
        run(self, call);
        for (size_t i = 0; i < count; ++i) CHECK(out[i] == expected(i));
      }
    }
  });
}

TEST(an_all_reduce_measures_its_result) {
  on_both([](Rank& self) {
    const int p = self.size();
    for (size_t count : kCounts) {
      std::vector<float> mine(count);
      double expected = 0, squares = -1;
      for (size_t i = 0; i < count; ++i) {
        mine[i] = float(i % 100 + self.id());
        const double sum = int(i % 100) * p + p * (p - 1) / 2;
        expected += sum * sum;  // of whole numbers: exact in any order
      }
      Call call;
      call.op = Op::AllReduce;
      call.inputs = call.outputs = {view(mine)};
      call.squares = &squares;
      run(self, call);
      CHECK_EQ(squares, expected);
    }
  });
}

TEST(exchanges) {
  on_both([](Rank& self) {
    const int p = self.size();
    for (size_t count : kCounts) {
      auto filled = [&](int value, size_t n) { return std::vector<float>(n, float(value)); };
      {
        auto mine = filled(self.id(), count);
        Call call;
        call.op = Op::Broadcast;
        call.root = p / 2;
        (self.id() == call.root ? call.inputs : call.outputs) = {view(mine)};
        run(self, call);
        CHECK(mine == filled(p / 2, count));
      }
      {
        // Rank i brings i elements more than the first.
        auto mine = filled(self.id(), count + self.id());
        std::vector<std::vector<float>> outs;
        for (int i = 0; i < p; ++i) outs.push_back(filled(-1, count + i));
        Call call;
        call.op = Op::AllGather;
        call.inputs = {view(mine)};
        for (auto& out : outs) call.outputs.push_back(view(out));
        run(self, call);
        for (int i = 0; i < p; ++i) CHECK(outs[i] == filled(i, count + i));
      }
      {
        std::vector<std::vector<float>> ins, outs;
        for (int i = 0; i < p; ++i) {
          ins.push_back(filled(self.id() * p + i, count + i * 3 + self.id()));
          outs.push_back(filled(-1, count + self.id() * 3 + i));
        }
        Call call;
        call.op = Op::AllToAll;
        for (auto& in : ins) call.inputs.push_back(view(in));
        for (auto& out : outs) call.outputs.push_back(view(out));
        run(self, call);
        for (int i = 0; i < p; ++i) CHECK(outs[i] == filled(i * p + self.id(), outs[i].size()));
      }
    }
  });
}

TEST(messages) {
  on_both([](Rank& self) {
    const int p = self.size();
    for (size_t count : {size_t(1), size_t(50), size_t(1000), size_t(20'000), size_t(400'000)}) {
      std::vector<float> out(count, float(self.id())), in(count, -1);
      int next = (self.id() + 1) % p, previous = (self.id() + p - 1) % p;
      auto send = std::make_shared<Delivery>(Op::Send, next, 7, DType::F32, view(out), 20, 20);
      self.mailbox.start(send, true);
      auto recv = std::make_shared<Delivery>(Op::Recv, count % 2 ? -1 : previous, 7, DType::F32,
                                             view(in), 20, 20);
      self.mailbox.start(recv, false);
      self.mailbox.wait(*recv, Deadline::in(20));
      self.mailbox.wait(*send, Deadline::in(20));
      CHECK(recv->source == previous);
      for (float value : in) CHECK(value == float(previous));
    }
    // More small messages than there are cells, sent before any is asked for, taken out of order.
    const int flood = 50;
    if (p > 1 && self.id() == 0)
      for (int i = 0; i < flood; ++i) {
        std::vector<float> one{float(i)};
        auto send = std::make_shared<Delivery>(Op::Send, 1, i, DType::F32, view(one), 20, 20);
        self.mailbox.start(send, false);
        self.mailbox.wait(*send, Deadline::in(20));
      }
    if (self.id() == 1)
      for (int i = flood - 1; i >= 0; --i) {
        std::vector<float> one{-1};
        auto recv = std::make_shared<Delivery>(Op::Recv, 0, i, DType::F32, view(one), 20, 20);
        self.mailbox.start(recv, false);
        self.mailbox.wait(*recv, Deadline::in(20));
        CHECK(one[0] == float(i));
      }
    Call barrier;
    barrier.op = Op::Barrier;
    self.group.run(barrier);
  });
}

TEST(mismatch_leaves_the_group_usable) {
  auto program = [](Rank& self) {
    for (int round = 0; round < 3; ++round) {
      std::vector<float> values(self.id() == 0 ? 3 : 4, 1);
      Call call;
      call.op = Op::AllReduce;
      call.ndim = 1;
      call.shape[0] = int64_t(call.count = values.size());
      call.inputs = call.outputs = {view(values)};
      bool caught = false;
      try {
        run(self, call);
      } catch (const Failure& failure) {
        caught = failure.kind == Kind::Mismatch;
      }
      CHECK(caught);
      for (float value : values) CHECK(value == 1);
      Call barrier;
      barrier.op = Op::Barrier;
      self.group.run(barrier);
    }
  };
  for (int size : {2, 5}) {
    on_threads(size, program);
    on_processes(size, program);
  }
}

TEST(a_killed_rank_is_named) {
  on_processes(1, [](Rank&) {});
  for (int size : {2, 4}) {
    auto roster = Roster::create(size, false);
    auto board = Board::create(roster, all_ranks(size), "world", "");
    std::vector<pid_t> children;
    for (int rank = 1; rank < size; ++rank) {
      pid_t child = ::fork();
      if (child == 0) {
        auto mine = Roster::open(roster->ticket());
        mine->join(rank, Deadline::in(20));
        Rank self(Board::open(mine, all_ranks(size), board->ticket(), rank, ""), rank);
        for (;;) {
          Call barrier;
          barrier.op = Op::Barrier;
          try {
            self.group.run(barrier);
          } catch (...) {
            ::_exit(0);
          }
        }
      }
      children.push_back(child);
    }
    roster->join(0, Deadline::in(20));
    Rank self(board, 0);
    bool named = false;
    try {
      for (int i = 0;; ++i) {
        if (i == 100) ::kill(children[0], SIGKILL);
        Call barrier;
        barrier.op = Op::Barrier;
        self.group.run(barrier);
      }
    } catch (const Failure& failure) {
      named = failure.kind == Kind::PeerFailed &&
              std::string(failure.what()).find("rank 1") != std::string::npos;
    }
    CHECK(named);
    for (pid_t child : children) ::waitpid(child, nullptr, 0);
  }
}

TEST(a_lane_keeps_order) {
  Lane lane;
  std::vector<int> seen;
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 100; ++i)
    jobs.push_back(lane.submit([&seen, i](bool) { seen.push_back(i); }, i % 2));
  for (auto& job : jobs) CHECK(job->wait(Clock::now() + std::chrono::seconds(20)));
  while (!lane.try_run([&] { seen.push_back(100); })) std::this_thread::yield();
  for (int i = 0; i <= 100; ++i) CHECK(seen[i] == i);
}

TEST(a_lane_is_helped) {
  Lane lane;
  std::atomic<int> helped{0}, done{0};
  auto body = [&](bool on_lane) {
    helped += !on_lane;
    ++done;
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::shared_ptr<Job>> jobs;
    for (int i = 0; i < 3; ++i) jobs.push_back(lane.submit(body, i == 1));
    std::thread other([&] { lane.help(*jobs[1]); });
    lane.help(*jobs[2]);
    CHECK(jobs[2]->wait(Clock::now() + std::chrono::seconds(20)));
    other.join();
    if (round % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(150));
  }
  CHECK(done == 6000);
  CHECK(helped > 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the worker falls asleep
  auto alone = lane.submit(body, false);                       // and nobody comes
  CHECK(alone->wait(Clock::now() + std::chrono::seconds(20)));
  lane.submit(body, false);
  lane.close();
  CHECK(done == 6002);
}

TEST(heap_gives_memory_back) {
  size_t before = Heap::mine()->used();
  {
    Block a = Block::shared(1 << 20), b = Block::shared(100), c = Block::shared(5 << 20);
    CHECK(Heap::mine()->contains(a.data(), a.size()));
    std::memset(c.data(), 1, c.size());
    CHECK(Heap::mine()->used() > before);
  }
  CHECK(Heap::mine()->used() == before);
  Block again = Block::shared(1 << 20);
  for (size_t i = 0; i < again.size(); i += 4096) CHECK(again.data()[i] == std::byte{0});
}

TEST(the_timeout_of_a_group_may_change_during_its_calls) {
  on_threads(2, [](Rank& self) {
    std::atomic<bool> done = false;
    std::thread other([&] {
      for (int round = 0; !done; ++round) self.group.timeout = 20 + round % 2;
    });
    for (int round = 0; round < 200; ++round) {
      Call call;
      run(self, call);
    }
    done = true;
    other.join();
  });
}
