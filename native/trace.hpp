// A record of all that the ranks of this process do: one file per rank of a world, for tools to
// read later. An operation is written when it begins and completed in place when it ends, straight
// into pages of the file. They are the system's: a rank that is killed leaves all it had written.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "board.hpp"

namespace phalanx::trace {

// A file is a head and then slots of one size, in the order of their beginning. The first slot of
// kind Nothing ends it: whoever writes a slot writes its kind last.
constexpr uint32_t kVersion = 1;
constexpr size_t kSlotBytes = 128;

struct Head {
  char magic[8];  // "PHXTRACE"
  uint32_t version;
  uint32_t slot_bytes;
  int32_t rank, size;  // of the world
  int32_t pid;
  uint32_t threads;  // ranks are threads of one process
  uint64_t world;
  uint64_t process_start;             // tells processes apart that had one pid
  int64_t monotonic_ns, realtime_ns;  // the same moment on two clocks
  std::atomic<uint64_t> lost;         // operations that found no room
  std::atomic<int32_t> error;         // why: an errno
  int32_t unused;
  char boot[40];  // of the machine: where it is the same, so is the monotonic clock
  char host[64];
};
constexpr size_t kHeadBytes = 4 * kSlotBytes;
static_assert(sizeof(Head) <= kHeadBytes);

enum class Kind : uint8_t { Nothing, Site, Group, Operation, Range };

struct SiteSlot {  // a place in the user's program; counted from 0 in the order of the file
  Kind kind;
  char site[80];
  char api[24];
};

struct GroupSlot {  // counted likewise
  Kind kind;
  int32_t rank, size;  // in the group
  uint64_t id;         // the same on all its ranks, and in no other group
  char name[64];
};

enum Flags : uint8_t { kAsync = 1, kOnLane = 2 };

struct OperationSlot {
  Kind kind;
  Op op;
  DType dtype;
  Reduce reduce;
  Progress progress;
  uint8_t ndim;
  uint8_t flags;
  uint8_t unused;
  uint32_t group, site;
  int32_t root;    // or the peer of a message, as a world rank; -1 for none
  int32_t tag;     // of a message
  int32_t source;  // of a message that has come, as a world rank; -1 otherwise
  uint16_t part, parts;
  uint64_t sequence;
  uint64_t bytes;
  int64_t issued_ns;    // called for; 0 if it began at once
  int64_t posted_ns;    // begun
  int64_t finished_ns;  // 0 while it goes on
  int64_t awaited_ns;   // when its user began to wait for an asynchronous one; 0 if nobody did
  int64_t shape[6];
};

struct RangeSlot {  // a stretch of the user's program
  Kind kind;
  uint32_t thread;
  int64_t started_ns, finished_ns;
  char name[96];
};

static_assert(std::is_standard_layout_v<Head> && std::is_trivially_destructible_v<Head>);
static_assert(std::is_trivially_copyable_v<SiteSlot> && std::is_trivially_copyable_v<GroupSlot> &&
              std::is_trivially_copyable_v<OperationSlot> &&
              std::is_trivially_copyable_v<RangeSlot>);
static_assert(std::atomic_ref<Kind>::is_always_lock_free);
static_assert(sizeof(SiteSlot) <= kSlotBytes && sizeof(GroupSlot) <= kSlotBytes);
static_assert(sizeof(OperationSlot) == kSlotBytes && sizeof(RangeSlot) <= kSlotBytes);

// A piece of a file in memory, for as long as anybody may write to it.
class Window;

// An operation that is being recorded; or none, and then nothing happens.
class Event {
 public:
  Event() = default;
  void end(Progress how, int64_t now, int64_t awaited_ns, int source = -1);

 private:
  friend class File;
  std::shared_ptr<Window> window_;
  OperationSlot* slot_ = nullptr;
};

// A stretch that is being recorded.
class Range {
 public:
  void end();  // a forked child leaves it to its parent

 private:
  friend class File;
  Origin origin_;
  std::shared_ptr<Window> window_;
  RangeSlot* slot_ = nullptr;
};

class File {
 public:
  File(const std::string& directory, const Roster& roster, int rank);
  ~File();
  File(const File&) = delete;

  uint32_t add_group(const Board& board, int rank);
  Event begin(const Posting& posting, uint32_t group, uint64_t bytes, int64_t issued_ns,
              uint8_t flags);
  Range begin_range(const std::string& name);
  // Write no more, and give back what was reserved. Returns what was lost, in words.
  std::string close();

 private:
  std::byte* next();
  bool extend();
  void fail(int error);
  void lose();
  uint32_t site_of(const Posting& posting);

  std::mutex mutex_;
  const int rank_;
  int fd_ = -1;
  bool closed_ = false;
  int error_ = 0;
  uint64_t lost_ = 0;
  size_t reserved_ = 0, used_ = 0;  // bytes of the file
  std::shared_ptr<Window> first_, window_;
  std::unordered_map<uint64_t, uint32_t> sites_;
  uint32_t groups_ = 0;
};

// Number of the recording that is going on; 0 for none. Relaxed: who sees it late misses a little.
extern std::atomic<uint32_t> recording;

void start(const std::string& directory);
// Returns what was lost, in words; nothing if all is well.
std::vector<std::string> stop();
// The file of a rank in the recording that goes on; null if there is none.
std::shared_ptr<File> file_of(const Roster& roster, int rank);

// Where one rank's end of a group tells of its operations. One call at a time.
class Tap {
 public:
  Tap(const Board& board, int rank) : board_(board), rank_(rank) {}
  static bool is_open() { return recording.load(std::memory_order_relaxed) != 0; }
  Event begin(const Posting& posting, uint64_t bytes, int64_t issued_ns, uint8_t flags) {
    return is_open() ? record(posting, bytes, issued_ns, flags) : Event();
  }

 private:
  Event record(const Posting& posting, uint64_t bytes, int64_t issued_ns, uint8_t flags);
  const Board& board_;
  const int rank_;
  uint32_t seen_ = 0;  // the recording that `file_` is of
  uint32_t group_ = 0;
  std::shared_ptr<File> file_;
};

}  // namespace phalanx::trace
