// One rank's end of a group: runs collectives on the board, one at a time and in order.
//
// Every collective is a meeting (post, wait for all, compare) followed by passes over memory with a
// tick, a barrier that compares nothing, between them. Nothing of the user's is written before the
// meeting has agreed.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "board.hpp"
#include "deadlock.hpp"
#include "kernels.hpp"
#include "strided.hpp"
#include "trace.hpp"

namespace phalanx {

inline bool overlap(const View& a, const View& b, size_t item) {
  return a.data < b.data + b.count * item && b.data < a.data + a.count * item;
}

// One collective as a rank asks for it. Outputs may be the inputs where the operation is in place.
// all_reduce, reduce: one input, one output (reduce: at the root). broadcast: an input at the root,
// an output elsewhere. all_gather: one input, an output per rank. gather: likewise, outputs at the
// root. scatter: an input per rank at the root, one output. reduce_scatter: an input per rank, one
// output. all_to_all: an input and an output per rank.
struct Call {
  Op op = Op::Barrier;
  DType dtype = DType::U8;
  Reduce reduce = Reduce::Sum;
  int root = -1;
  double factor = 1;
  double timeout = -1;        // seconds; negative: the group's
  double* squares = nullptr;  // all_reduce: where the sum of squares of the result is wanted
  std::vector<View> inputs, outputs;
  int ndim = 0;
  int64_t shape[6] = {};
  uint32_t more_shape = 0;  // as a Posting has them
  uint64_t count = 0;
  uint64_t detail = 0;
  uint16_t part = 0, parts = 0;  // its place in a batch
  bool on_lane = false;          // runs on the lane's thread, not the user's
  bool async = false;            // its user goes on meanwhile
  int64_t issued_ns = 0;         // when it was put into the lane's queue, while a trace is recorded
  std::shared_ptr<std::atomic<int64_t>> awaited_ns;  // and when its user began to wait for it
  char site[80] = {};
  char api[24] = {};
  char whole[72] = {};  // likewise
  uint64_t whole_number = 0;

  // Dense stand-ins for strided tensors and copies of overlapping ones. Once a call has lent memory
  // to the others, they and the tensors must outlive it even if it fails: `lent` tells.
  std::vector<std::shared_ptr<std::byte[]>> scratch;
  bool lent = false;
  std::byte* need(size_t bytes) {
    return scratch.emplace_back(new std::byte[std::max<size_t>(bytes, 1)]).get();
  }
};

// The debug level of this process.
inline std::atomic<DebugLevel> debug_level = DebugLevel::Off;

// Called once an operation is done whose ranks have brought equally many elements in different
// shapes, by one rank and only above level Off: the world's rank, the line and what to say of it.
using OnShapes = void (*)(int rank, const std::string& site, const std::string& what);
inline std::atomic<OnShapes> on_shapes = nullptr;

// The sources of a reduction, one per rank; kept between calls to spare the allocations.
struct Combine {
  std::vector<const void*> sources;
  std::vector<double> factors;
  double squares = 0;  // of all that was combined since it was set to zero, if the call asks for it
  void into(const Call& call, std::span<void* const> dsts, size_t count);
};

class Group {
 public:
  Group(std::shared_ptr<Board> board, int rank, std::string name, double timeout);
  ~Group();

  int rank() const { return rank_; }
  int size() const { return board_->size(); }
  const std::string& name() const { return name_; }
  // Seconds, for calls that bring none. Any thread may set it while another one runs a call.
  std::atomic<double> timeout;
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  void run(Call& call);

  // To measure what they cost: whether postings are compared, and whether they are kept where the
  // ways of the small can do without.
  std::atomic<bool> compares = true, records = true;

 private:
  // What is known of the operation under way. The posting is written here and shown at the meeting.
  struct Passage {
    Call& call;
    double seconds;  // that it may take
    Deadline deadline;
    uint64_t sequence;
    size_t item;
    Posting posting;
    Clock::time_point start;
    Waiter waiter;
    bool meeting = false;       // not all have arrived yet: it can still be given up
    bool titled = false;        // what is thrown says itself which operation it is about
    bool tells_shapes = false;  // at the end
    trace::Event event = {};
  };

  void exchange(Passage& passage);
  Offer private_offer(Op op, uint64_t bytes) const;
  void reduce(Passage& passage);
  void reduce_inline(Passage& passage, size_t bytes);
  void reduce_direct(Passage& passage);
  void reduce_staged(Passage& passage, bool filled);
  View piece(const Call& call, size_t item, int rank) const;
  size_t stride(const Passage& passage) const;
  void fill(const Passage& passage, uint32_t step);
  void show_squares(const Passage& passage);
  void add_squares(const Passage& passage);

  // Post, wait for all, compare. Throws on every rank alike where postings differ.
  void meet(Passage& passage, Offer offer);
  void tick(Passage& passage);
  bool arrive(bool compare);
  void await(Passage& passage);
  bool same_postings() const;
  bool same_shapes() const;
  bool is_to_tell() const;
  bool is_open() const;  // the door of a crowded board: all have reached this meeting
  bool agreed() const;
  void look(Passage& passage, bool costly);
  void judge(Passage& passage, std::span<const int> missing, WaitFacts& facts);
  void check_deadlock(Passage& passage, const std::optional<std::string>& verdict);
  void conclude(Passage& passage, Progress how);
  void await_readers(Passage& passage);
  bool give_up(Passage& passage, Progress how);
  void break_up(Kind kind, const std::string& why, bool seen);
  [[noreturn]] void throw_given_up(Passage& passage);
  bool reached(int rank) const { return board_->reached(rank, clock_); }
  std::string headline(const Passage& passage) const;
  std::string uneven(const Passage& passage, std::span<const int> gone) const;

  Offer offer_of(int rank) const { return board_->seat(rank).lines[clock_ & 1].offer; }
  // Where an Inline offer of so many bytes stands: in the line if it fits, else in the slot.
  std::byte* inline_area(int rank, uint64_t clock, uint64_t sequence, size_t bytes) const;
  // A stage has room for the pieces of three turns: one being filled, one being combined or taken,
  // one whose results are being taken.
  static constexpr size_t kTurns = 3;
  uint64_t need_stage();
  size_t place(uint64_t turn) const { return turn % kTurns * chunk_; }
  std::byte* stage(const Passage& passage, int rank, uint64_t turn) const;

  const Origin origin_;
  std::shared_ptr<Board> board_;
  int rank_;
  std::string name_;
  trace::Tap tap_;
  bool posted_ = false;  // the others count on this rank: a failure now breaks the group
  bool heard_ = false;   // this rank has raised that the group is broken
  uint64_t met_ = 0;     // clock at the end of the last operation that was not given up
  bool ahead_ = false;   // the last meeting was given up: others may not have come that far
  Spin spin_;
  uint64_t clock_ = 0;
  uint64_t turn_ = 0;
  std::atomic<uint64_t> sequence_ = 0;
  size_t chunk_;
  Combine combine_;
  Block stage_;
};

}  // namespace phalanx
