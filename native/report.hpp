// What the user is told: the texts of mismatches, timeouts and deadlocks.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "board.hpp"

namespace phalanx {

// A wait of a rank that cannot move, as it was found in the roster.
struct BlockedWait {
  int rank;
  Wait* wait;
  WaitFacts facts;
};

// "ranks 0-2, 5" of a list of ranks in rising order.
std::string rank_list(std::span<const int> ranks);

// "all_reduce(float32[4], SUM) #16 at train.py:80 in step, done 0.3 s ago"
std::string describe_posting(const Posting& posting);

// A meeting at which not all postings agree: one line per kind of posting, and the likely reason.
std::string mismatch_report(const Board& board, uint64_t sequence);

// Ranks that agree but for the shapes of their tensors: one line per shape.
std::string shapes_report(const Board& board, uint64_t sequence);

// What each of these ranks of a board does while others wait for it: one line per rank.
std::string describe_absent(const Board& board, std::span<const int> ranks);

// Who waits for whom, one line per wait, a cycle, and the likely reason.
std::string deadlock_report(size_t world_size, const std::vector<BlockedWait>& waits);

}  // namespace phalanx
