// Meetings that are given up, step by step. A rank that gives up and one that arrives meet in a few
// instructions: here the test takes the part of one of them and writes its words by hand, so that
// each order of the two is tried, and not only the likely ones.
#include <thread>

#include "ranks.hpp"

using namespace phalanx;

namespace {

// Two ranks that are threads of this process, on a board that is crowded or not.
struct Two {
  std::shared_ptr<Roster> roster = Roster::create(2, true);
  std::shared_ptr<Board> board;
  std::shared_ptr<Region> region;
  explicit Two(bool crowded) {
    std::thread other([&] { roster->join(1, Deadline::in(20)); });
    roster->join(0, Deadline::in(20));
    other.join();
    auto made = Board::create(roster, {0, 1}, "world", "");
    region = Region::open(made->ticket(), Content::Board);
    header().crowded = crowded;
    board = Board::open(roster, {0, 1}, made->ticket(), 0, "");
  }
  BoardHeader& header() const { return *reinterpret_cast<BoardHeader*>(region->data()); }
  Posting& posting(int rank, uint64_t sequence) const { return board->posting(rank, sequence); }
  void arrive(int rank, uint64_t clock) const {
    board->seat(rank).lines[clock & 1].clock.store(uint32_t(clock));
  }
  bool gives_up(int rank, uint64_t clock) const {
    return board->give_up(rank, clock, posting(rank, clock), Progress::TimedOut);
  }
};

// Ask in another thread, which must not have an answer before `decide` has run.
template <class Ask, class Decide>
bool answer_after(Ask&& ask, Decide&& decide) {
  std::atomic<bool> asked{false}, answered{false}, answer{false};
  std::thread other([&] {
    asked = true;
    answer = ask();
    answered = true;
  });
  while (!asked) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // one that does not wait is done
  CHECK(!answered);
  decide();
  other.join();
  return answer;
}

}  // namespace

TEST(who_arrives_while_another_is_in_doubt_waits_for_its_decision) {
  for (bool gives_up : {true, false}) {
    Two two(false);
    two.arrive(0, 1);
    two.header().doubt = 2;  // rank 1 has begun to count who is here
    const bool given_up = answer_after([&] { return two.board->is_given_up(1); },
                                       [&] {
                                         if (gives_up) {
                                           two.header().given_up_first = 1;
                                           two.header().given_up_last = 1;
                                         }
                                         two.header().doubt = 0;
                                       });
    CHECK_EQ(given_up, gives_up);
  }
}

TEST(only_one_rank_at_a_time_is_in_doubt) {
  Two two(false);
  two.arrive(0, 1);
  two.header().doubt = 2;
  const bool given_up = answer_after([&] { return two.gives_up(0, 1); },
                                     [&] {
                                       two.arrive(1, 1);  // it has come after all
                                       two.header().doubt = 0;
                                     });
  CHECK(!given_up);
  CHECK(!two.board->is_given_up(1));
  CHECK_EQ(two.header().doubt.load(), 0u);
}

TEST(nobody_waits_for_the_decision_of_a_rank_that_has_ended) {
  Two two(false);
  two.arrive(0, 1);
  two.header().doubt = 2;
  two.roster->fail(1, "raised an exception");
  CHECK_THROWS(two.board->is_given_up(1), Failure);
  CHECK_THROWS(two.gives_up(0, 1), Failure);
}

TEST(a_meeting_is_given_up_only_while_somebody_is_missing) {
  for (bool crowded : {false, true}) {
    Two two(crowded);
    auto come = [&](int rank, uint64_t clock) {
      two.arrive(rank, clock);
      return crowded ? two.board->count_arrival(clock) : Board::Arrival::Early;
    };
    // Clock 1: both come, and then it is too late to give up.
    come(0, 1);
    const auto last = come(1, 1);
    if (crowded) {
      CHECK(last == Board::Arrival::Last);
      two.board->door() = 1;
    }
    CHECK(!two.gives_up(0, 1));
    CHECK(!two.board->is_given_up(1));
    CHECK(two.posting(0, 1).progress == Progress::Waiting);
    // Clock 2: rank 0 gives up alone; rank 1 learns of it when it comes.
    come(0, 2);
    CHECK(two.gives_up(0, 2));
    CHECK(two.board->is_given_up(2));
    CHECK(two.posting(0, 2).progress == Progress::TimedOut);
    const auto late = come(1, 2);
    if (crowded) CHECK(late == Board::Arrival::TooLate);
    // Who is told of it gives it up as well, though all have come by now.
    CHECK(two.gives_up(1, 2));
    // The row has one meeting: neither the one before it nor the next was given up.
    CHECK(!two.board->is_given_up(1));
    CHECK(!two.board->is_given_up(3));
  }
}

TEST(meetings_given_up_one_after_the_other_form_a_row) {
  Two two(false);
  for (uint64_t clock : {5, 6, 7}) {
    two.arrive(0, clock);
    CHECK(two.gives_up(0, clock));
  }
  for (uint64_t clock : {4, 5, 6, 7, 8})
    CHECK_EQ(two.board->is_given_up(clock), clock >= 5 && clock <= 7);
  // The next row forgets the last: all have been to 8 before anybody gives up 9.
  for (int rank : {0, 1}) two.arrive(rank, 8);
  two.arrive(0, 9);
  CHECK(two.gives_up(0, 9));
  for (uint64_t clock : {8, 9, 10}) CHECK_EQ(two.board->is_given_up(clock), clock == 9);
}

TEST(the_first_to_end_is_named_whatever_its_rank) {
  for (int first : {1, 2}) {
    auto roster = Roster::create(3, true);
    std::vector<std::thread> others;
    for (int rank : {1, 2})
      others.emplace_back([&, rank] { roster->join(rank, Deadline::in(20)); });
    roster->join(0, Deadline::in(20));
    for (auto& other : others) other.join();
    auto board = Board::create(roster, {0, 1, 2}, "world", "");
    const int second = 3 - first;
    roster->fail(first, "was the first");
    while (now_ns() <= roster->ended_ns(first)) continue;
    roster->fail(second, "came later");
    const std::vector<int> both{1, 2};
    const std::string told = board->first_obituary(both, true);
    CHECK(told.find("was the first") != std::string::npos);
    CHECK(told.find("came later") == std::string::npos);
  }
}

TEST(the_first_word_on_why_a_board_is_broken_counts) {
  Two two(false);
  two.board->break_up(Kind::Timeout, "too late");
  two.board->break_up(Kind::PeerFailed, "gone");
  auto failure = two.board->broken();
  REQUIRE(failure.has_value());
  CHECK(failure->kind == Kind::Timeout);
  CHECK_EQ(std::string(failure->what()), "too late");
  CHECK(!two.board->broken_for(Op::Recv).has_value());  // messages are each for itself
  CHECK(two.board->broken_for(Op::AllReduce).has_value());
}
