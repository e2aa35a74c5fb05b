// Everything that ranks keep in memory that they share, and that a tool may look at from outside:
// the roster of a world, the boards of its groups, the rings of its mailboxes.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "heap.hpp"
#include "types.hpp"
#include "wait.hpp"

namespace phalanx {

enum class Op : uint8_t {
  Barrier,
  Broadcast,
  AllReduce,
  Reduce,
  AllGather,
  Gather,
  Scatter,
  ReduceScatter,
  AllToAll,
  Send,
  Recv,
};
const char* name(Op op);
constexpr bool is_message(Op op) { return op == Op::Send || op == Op::Recv; }
constexpr bool is_reduction(Op op) {
  return op == Op::AllReduce || op == Op::Reduce || op == Op::ReduceScatter;
}
// Whether ranks may rightly bring tensors of different sizes.
constexpr bool may_differ_in_size(Op op) {
  return op == Op::AllGather || op == Op::ReduceScatter || op == Op::AllToAll;
}

// How much a rank wants to be told, as in Python.
enum class DebugLevel : uint8_t { Off, Info, Detail };

// How a rank offers its data to the others.
enum class Offer : uint8_t {
  Nothing,
  Inline,  // copied into the seat before posting
  Direct,  // the others read it where it is, in memory that they share
  Remote,  // the others read it where it is, through the system
  Staged,  // passed through a buffer, piece by piece
};

// How far an operation has come on the rank that posted it.
enum class Progress : uint8_t { Waiting, Done, TimedOut, Mismatch, Deadlock, Interrupted, Failed };
const char* name(Progress how);

// One operation as its rank announced it. Read by the others only after the seat's line says so.
struct Posting {
  uint64_t sequence;
  Op op;
  DType dtype;
  Reduce reduce;
  Offer offer;
  uint8_t ndim;
  Progress progress;
  uint16_t part, parts;  // "[1 of 3]": its place in a batch of calls that belong together
  uint8_t measured;      // the sum of squares of the result is asked for
  int32_t root;          // or the peer, for send and recv, as a world rank; -1 for none
  int32_t tag;           // of send and recv
  uint32_t more_shape;   // hash of the dimensions that `shape` has no room for; 0 for none
  int64_t shape[6];
  uint64_t count;   // elements of the tensor
  uint64_t detail;  // hash of what must agree beyond the fields above (lists of sizes)
  double factor;    // PREMUL_SUM
  double squares;   // its rank's share of the sum of squares, before the last tick
  uint64_t data;    // where a Direct offer starts, as the owner's heap offset or a thread's pointer
  uint64_t stage;   // the owner's staging buffer, likewise; 0 while it has none
  uint64_t bytes;   // how much is offered in all
  int64_t posted_ns, finished_ns;
  char site[80];  // "train.py:88 in step"
  char api[24];   // the public function that was called, where the operation is only a part of it
  // Of what larger operation, over hosts, this is a step: as it is described there, and its number.
  char whole[72];
  uint64_t whole_number;

  // What every rank must have posted alike: equal digests mean equal operations. Of a tensor the
  // count is compared and not the shape. Where ranks may rightly bring different counts, `detail`
  // stands for what they must agree on instead.
  uint64_t digest() const;
  // Whether the tensors have one shape, where operations that agree should have one.
  bool is_shaped_like(const Posting& other) const;
  std::string describe() const;  // "all_reduce(float32[1024], SUM)"
  std::string kind() const;      // "all_reduce"
  std::string title() const;     // "all_reduce #7"
  uint64_t number() const { return whole[0] ? whole_number : sequence; }

  void reach(Progress how, int64_t now) {
    std::atomic_ref(finished_ns).store(now, std::memory_order_relaxed);
    std::atomic_ref(progress).store(how, std::memory_order_release);
  }

  // Write it where others may glance at it meanwhile, and such a glance, which may see something
  // half written: good enough to tell a person about it.
  void show(Posting& place) const;
  static Posting glance(const Posting& place);
};

// A word of a structure of any type: GCC and Clang let it alias them all.
using AnyWord __attribute__((may_alias)) = uint64_t;
static_assert(sizeof(Posting) % sizeof(AnyWord) == 0 && alignof(Posting) >= alignof(AnyWord));
static_assert(std::is_trivially_copyable_v<Posting> && std::is_standard_layout_v<Posting>);

inline void Posting::show(Posting& place) const {
  auto* from = reinterpret_cast<const AnyWord*>(this);
  auto* to = reinterpret_cast<AnyWord*>(&place);
  for (size_t i = 0; i < sizeof(Posting) / sizeof(AnyWord); ++i)
    __atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
}

inline Posting Posting::glance(const Posting& place) {
  Posting copy;
  auto* from = reinterpret_cast<const AnyWord*>(&place);
  auto* to = reinterpret_cast<AnyWord*>(&copy);
  for (size_t i = 0; i < sizeof(Posting) / sizeof(AnyWord); ++i)
    to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
  return copy;
}

constexpr size_t kLinePayload = 48;
constexpr uint32_t kHistory = 64;  // postings kept per seat, and as many messages

// The cache line through which ranks meet. A seat has two and uses them in turn: a rank can be at
// most one tick ahead of another, so the line that a slow rank still reads is not written.
struct alignas(64) Line {
  std::atomic<uint32_t> clock;
  Offer offer;
  DebugLevel level;  // of the rank
  uint64_t digest;
  std::byte payload[kLinePayload];
};
static_assert(sizeof(Line) == 64);

struct Seat {
  Line lines[2];
  Bell mail;  // rung when something arrives for, or leaves, this rank's mailbox
  alignas(64) std::atomic<bool> present;  // its rank has opened the board
  std::atomic<bool> left;                 // and closed it again
  std::atomic<int64_t> left_ns;           // when
  std::atomic<uint32_t> outbox;           // messages that wait for a free cell
  std::atomic<uint32_t> attending;        // threads that see to what arrives in the mailbox
  std::atomic<uint64_t> finished;         // clock up to which its rank has read what others offer
  std::atomic<uint64_t> newest;           // sequence of the last posting
  std::atomic<uint64_t> newest_message;   // and of the last message
  Posting history[kHistory];
  Posting messages[kHistory];
};

// What one rank tells each other rank about the data it has for it.
struct Parcel {
  uint64_t data;   // where a Direct offer is; for other offers its place in what is offered
  uint64_t given;  // bytes that the owner has for the other
  uint64_t taken;  // bytes that the owner expects from the other
};

constexpr uint32_t kCells = 8;

// One message slot of the ring between two ranks.
struct alignas(64) Cell {
  std::atomic<uint32_t> turn;  // twice the lap: free; one more: full
  int32_t tag;
  DType dtype;
  bool piped;
  uint64_t count;  // elements
  uint64_t pipe;   // shared address of the Pipe
  std::byte payload[224];
};
static_assert(sizeof(Cell) == 256);

// Where a message that does not fit into a cell passes from the sender's memory to the receiver's.
struct Pipe {
  // Taking: the receiver is reading the sender's own memory, which must stay until it is done.
  // Refused: the receiver asked for something else; Unread: it gave up, or left without asking.
  enum State : uint32_t { Open, Taking, Refused, Unread, Abandoned };
  uint64_t direct;    // shared address of the whole message, or 0 if it flows through `data`
  uint64_t bytes;     // of the message
  uint64_t capacity;  // of `data`
  alignas(64) std::atomic<uint64_t> filled;   // by the sender
  alignas(64) std::atomic<uint64_t> drained;  // by the receiver
  std::atomic<State> state;
  std::atomic<bool> wanted;  // a receive has met it and takes it in
  alignas(64) std::byte data[];
};

// A board: its header, the members' world ranks, and then a seat, two slots, a row of parcels and a
// row of cells per rank.
struct BoardHeader {
  uint64_t roster;  // id of the world's region
  uint32_t size;
  uint32_t crowded;
  char name[64];
  char site[80];  // where its creator makes it
  Bell bell;
  alignas(64) std::atomic<uint64_t> arrived;  // at crowded boards: clock and how many
  alignas(64) std::atomic<uint32_t> mismatch;
  std::atomic<uint32_t> door;
  alignas(64) std::atomic<uint32_t> broken;  // 0 no, 1 being written, 2 yes
  std::atomic<uint32_t> doubt;               // rank + 1 of one that is about to give up a meeting
  std::atomic<uint64_t> given_up_first, given_up_last;  // clocks of the last meetings given up
  uint32_t kind;
  uint32_t seen;  // it was broken by the end of a rank, which all can see for themselves
  uint32_t why_length;
  char why[6000];
};

constexpr size_t kSlot = 16 << 10;

struct BoardLayout {
  size_t members, seats, slots, parcels, cells, end;
  explicit constexpr BoardLayout(size_t p) {
    auto lines = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
    members = lines(sizeof(BoardHeader));
    seats = members + lines(p * sizeof(int32_t));
    slots = seats + p * sizeof(Seat);
    parcels = slots + p * 2 * kSlot;
    cells = parcels + lines(p * 2 * p * sizeof(Parcel));
    end = cells + p * p * kCells * sizeof(Cell);
  }
};
static_assert(sizeof(Seat) % 64 == 0);

// A value that one writes and others may copy at any time: they try again if it changed meanwhile.
template <class T>
class Notice {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  void write(const T& value) {
    uint64_t words[kWords] = {};
    std::memcpy(words, &value, sizeof value);
    uint32_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // Release: whoever sees a new word also sees the odd version before it.
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
    version_.store(version + 2, std::memory_order_release);
  }
  // False if it was being written.
  bool read(T& value) const {
    uint64_t words[kWords];
    uint32_t version = version_.load(std::memory_order_acquire);
    // Acquire: no word is read after the second look at the version.
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    if (version % 2 || version_.load(std::memory_order_relaxed) != version) return false;
    std::memcpy(static_cast<void*>(&value), words, sizeof value);
    return true;
  }

 private:
  static constexpr size_t kWords = (sizeof(T) + 7) / 8;
  std::atomic<uint32_t> version_;
  std::atomic<uint64_t> words_[kWords];
};

constexpr int kMostRanks = 1024;  // of a world whose waits are searched for deadlocks

class RankSet {
 public:
  // Ranks beyond the most are not kept: nobody searches worlds that have them.
  void add(int rank) {
    if (rank >= 0 && rank < kMostRanks) words_[rank / 64] |= uint64_t(1) << rank % 64;
  }
  bool has(int rank) const {
    return rank >= 0 && rank < kMostRanks && (words_[rank / 64] >> rank % 64 & 1);
  }

 private:
  uint64_t words_[kMostRanks / 64] = {};
};

// What a thread of a rank waits for, written once it has waited for a slice and again in each.
struct WaitFacts {
  bool blocked = false;  // only other ranks can end the wait, and only by a new action
  bool lane = false;     // the thread is a lane's, not the user's
  bool own = false;      // it waits for another thread of its own rank
  bool making = false;   // it waits for the others to make a group
  bool any = false;      // one of `needs` is enough; otherwise it takes all of them
  RankSet needs;         // world ranks
  Op op = Op::Barrier;
  int64_t started_ns = 0;  // when the wait began
  int64_t since_ns = 0;    // when it was first shown
  int64_t checked_ns = 0;  // when `blocked` and `needs` were last judged, at the earliest
  char group[64] = {};
  char what[128] = {};  // "recv(float32[4], tag=0) from rank 1"
  char site[80] = {};
};

struct Wait {
  std::atomic<bool> taken;
  std::atomic<uint32_t> report;  // number of the deadlock that it has been found to be in
  std::atomic<int64_t> doom;     // the since_ns of the wait that this is true of
  Notice<WaitFacts> facts;
};

constexpr int kWaits = 16;  // threads of one rank that can be seen waiting

enum class Presence : uint32_t { Absent, Joining, Here, Left, Failed };

// A text for all ranks to read.
struct Note {
  uint32_t length = 0;
  char text[8192];
};

// One rank of a world.
struct Member {
  std::atomic<Presence> presence;
  bool remote;  // on another host: what is known of it has been told
  HeapAddress heap;
  uint64_t base;   // of its heap in its own address space
  int32_t thread;  // that joined, by the system's number
  cpu_set_t cores;
  char host[64];
  std::atomic<int32_t> signal;    // that it is dying of
  int64_t oom_kills;              // by the system until it joined
  std::atomic<int64_t> ended_ns;  // when it left or failed
  std::atomic<uint32_t> why_length;
  char why[4096];

  std::atomic<int32_t> threads;  // of the user's that may act for the rank, waiting ones included
  std::atomic<int32_t> lanes;    // lanes that have work, likewise
  std::atomic<int32_t> unseen;   // waits that found no room below
  std::atomic<int64_t> changed_ns;  // when one of these or a wait came or went
  Wait waits[kWaits];
  Notice<Note> note;
};

struct DeadlockReport {
  std::atomic<uint32_t> number;  // set last
  uint32_t length;
  char text[8000];
};

struct RosterHeader {
  uint32_t size;
  uint32_t threads;  // ranks are threads of one process
  uint32_t remote;   // how many of them are on other hosts
  int64_t started_ns;
  Bell bell;
  std::atomic<uint32_t> probed;           // ranks that have tried to read the others' memory
  std::atomic<bool> reading_is_denied;    // to at least one of them
  std::atomic<int64_t> telling_since_ns;  // when the last report was begun
  std::atomic<uint32_t> deadlocks;        // found so far; odd: being written, 2 per deadlock
  DeadlockReport reports[4];              // the last few, by number
};

// Tells apart builds that lay out differently what is described here.
constexpr uint64_t kLayout = [] {
  uint64_t hash = 2;  // to be raised when something changes its meaning and not its size
  for (uint64_t size :
       {sizeof(HeapHeader), sizeof(RosterHeader), sizeof(Member), offsetof(Member, waits),
        sizeof(Wait), sizeof(WaitFacts), sizeof(BoardHeader), sizeof(Seat), sizeof(Line),
        offsetof(Seat, newest), sizeof(Posting), offsetof(Posting, site), sizeof(Cell), kSlot})
    hash = (hash ^ size) * 0x100000001b3;
  return hash;
}();

uint64_t mix(uint64_t hash, uint64_t value);

// What was read from another process, or told by another host, may be anything: end its texts, make
// its flags truth values; false if it is nonsense all the same.
bool make_sound(Posting& posting);
bool make_sound(WaitFacts& facts);
// What is no truth value must not be read as one.
template <class Flag>
bool is_set(const Flag& flag) {
  static_assert(sizeof flag == 1);
  return *reinterpret_cast<const unsigned char*>(&flag) != 0;
}

// What a seat remembers, oldest first. Another rank's seat may be written meanwhile, so each
// posting is copied, and left out if it is not what its place says.
std::vector<Posting> history_of(const Seat& seat);

// A lock would be in the memory of one process, and a destructor run in one of them. What is read
// from another process as bytes needs a layout that follows from its members.
template <class... Structures>
constexpr bool shareable =
    ((std::is_standard_layout_v<Structures> && std::is_trivially_destructible_v<Structures>) &&
     ...);
static_assert(shareable<HeapHeader, RosterHeader, Member, Wait, BoardHeader, Seat, Line, Parcel,
                        Cell, Pipe, DeadlockReport>);
template <class... Values>
constexpr bool lock_free = (std::atomic<Values>::is_always_lock_free && ...) &&
                           (std::atomic_ref<Values>::is_always_lock_free && ...);
static_assert(
    lock_free<bool, int32_t, uint32_t, int64_t, uint64_t, Presence, Progress, Offer, Pipe::State>);

inline Member* members_of(RosterHeader* roster) { return reinterpret_cast<Member*>(roster + 1); }

}  // namespace phalanx
