// Ranks for the native tests: the same program as threads and as forked processes.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <numeric>
#include <thread>

#include "check.hpp"
#include "mailbox.hpp"

namespace phalanx {

struct Rank {
  std::shared_ptr<Board> board;
  Group group;
  Mailbox mailbox;
  Rank(std::shared_ptr<Board> board, int rank)
      : board(board), group(board, rank, "world", 20), mailbox(board, rank, "world") {}
  int id() const { return group.rank(); }
  int size() const { return group.size(); }
};

using Program = std::function<void(Rank&)>;

inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

inline void on_threads(int size, const Program& program) {
  auto roster = Roster::create(size, true);
  auto first = Board::create(roster, all_ranks(size), "world", "");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      auto mine = rank == 0 ? roster : Roster::open(roster->ticket());
      mine->join(rank, Deadline::in(20));
      Rank self(rank == 0 ? first : Board::open(mine, all_ranks(size), first->ticket(), rank, ""),
                rank);
      program(self);
    });
  for (auto& thread : threads) thread.join();
}

// Rank 0 is this process; the others are forked and reach its memory through /proc.
inline void on_processes(int size, const Program& program) {
  auto roster = Roster::create(size, false);
  auto board = Board::create(roster, all_ranks(size), "world", "");
  std::vector<pid_t> children;
  for (int rank = 1; rank < size; ++rank) {
    pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        auto mine = Roster::open(roster->ticket());
        mine->join(rank, Deadline::in(20));
        Rank self(Board::open(mine, all_ranks(size), board->ticket(), rank, ""), rank);
        program(self);
        status = 0;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(status);
    }
    children.push_back(child);
  }
  roster->join(0, Deadline::in(20));
  {
    Rank self(board, 0);
    program(self);
  }
  for (pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(status == 0);
  }
}

inline void on_both(const Program& program) {
  for (int size : {1, 2, 3, 5}) {
    on_threads(size, program);
    on_processes(size, program);
  }
}

inline View view(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size(), nullptr};
}

}  // namespace phalanx
