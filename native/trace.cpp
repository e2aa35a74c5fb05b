#include "trace.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <utility>

#include "process.hpp"

namespace phalanx::trace {

// Mapped as long as somebody holds it.
class Window {
 public:
  static constexpr size_t kBytes = 1 << 20;
  Window(int fd, size_t offset)
      : data_(static_cast<std::byte*>(
            ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, off_t(offset)))) {}
  ~Window() {
    if (*this) ::munmap(data_, kBytes);
  }
  Window(const Window&) = delete;
  explicit operator bool() const { return data_ != MAP_FAILED; }
  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
};

namespace {

template <class Slot>
void publish(Slot* slot, Kind kind) {
  std::atomic_ref(slot->kind).store(kind, std::memory_order_release);
}

template <class T>
void set(T& place, T value) {
  std::atomic_ref(place).store(value, std::memory_order_relaxed);
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

int64_t wall_clock_ns() {
  auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

struct Session {
  std::mutex mutex;
  std::string directory;
  std::map<std::pair<uint64_t, int>, std::shared_ptr<File>> files;  // by world and rank
};

Session*& session() {
  static auto* current = new Session;
  return current;
}

uint32_t recordings = 0;  // so far

// A forked child writes files of its own, and leaves its parent's alone.
[[maybe_unused]] const bool handles_forks = after_fork_in_child([] {
  auto* own = new Session;
  own->directory = session()->directory;
  leave_alone(std::exchange(session(), own));
  if (recording.load(std::memory_order_relaxed) != 0) recording.store(++recordings);
});

}  // namespace

std::atomic<uint32_t> recording = 0;

void Event::end(Progress how, int64_t now, int64_t awaited_ns, int source) {
  if (!slot_) return;
  set(slot_->awaited_ns, awaited_ns);
  set(slot_->source, int32_t(source));
  set(slot_->finished_ns, now);
  std::atomic_ref(slot_->progress).store(how, std::memory_order_release);
  slot_ = nullptr;
  window_.reset();
}

void Range::end() {
  if (!slot_ || !origin_.is_here()) return;
  set(slot_->finished_ns, now_ns());
  slot_ = nullptr;
  window_.reset();
}

File::File(const std::string& directory, const Roster& roster, int rank) : rank_(rank) {
  const std::string start =
      directory + "/rank" + std::to_string(rank) + "-" + std::to_string(::getpid());
  for (int copy = 1; fd_ < 0; ++copy) {
    std::string path = start;
    if (copy > 1) path.append("-").append(std::to_string(copy));
    path += ".trace";
    // Shapes, lines of code and names of a program are nobody else's business.
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd_ < 0 && errno != EEXIST) {
      fail(errno);
      return;
    }
  }
  if (!extend()) return;
  first_ = window_;
  used_ = kHeadBytes;
  auto& head = *reinterpret_cast<Head*>(first_->data());
  head.version = kVersion;
  head.slot_bytes = kSlotBytes;
  head.rank = rank;
  head.size = roster.size();
  head.pid = ::getpid();
  head.threads = roster.threads();
  head.world = roster.id();
  head.process_start = facts_of(::getpid()).start_time;
  head.monotonic_ns = now_ns();
  head.realtime_ns = wall_clock_ns();
  boot_id().copy(head.boot, sizeof head.boot - 1);
  host_name().copy(head.host, sizeof head.host - 1);
  std::memcpy(head.magic, "PHXTRACE", sizeof head.magic);
}

File::~File() {
  close();
  if (fd_ >= 0) ::close(fd_);
}

// Reserve room for more. With room reserved, a full disk is an error here and not a SIGBUS later.
bool File::extend() {
  if (int error = ::posix_fallocate(fd_, off_t(reserved_), Window::kBytes)) {
    fail(error);
    return false;
  }
  auto window = std::make_shared<Window>(fd_, reserved_);
  if (!*window) {
    fail(errno);
    return false;
  }
  window_ = std::move(window);
  reserved_ += Window::kBytes;
  return true;
}

void File::fail(int error) {
  error_ = error;
  if (first_) reinterpret_cast<Head*>(first_->data())->error = error;
}

void File::lose() {
  if (closed_) return;
  ++lost_;
  if (first_) reinterpret_cast<Head*>(first_->data())->lost = lost_;
}

// A free slot; null if there is no room.
std::byte* File::next() {
  if (closed_) return nullptr;
  if (error_ || (used_ == reserved_ && !extend())) return nullptr;
  std::byte* slot = window_->data() + used_ % Window::kBytes;
  used_ += kSlotBytes;
  return slot;
}

uint32_t File::add_group(const Board& board, int rank) {
  std::lock_guard lock(mutex_);
  auto* slot = reinterpret_cast<GroupSlot*>(next());
  if (!slot) return UINT32_MAX;
  slot->rank = rank;
  slot->size = board.size();
  slot->id = board.id();
  board.name().copy(slot->name, sizeof slot->name - 1);
  publish(slot, Kind::Group);
  return groups_++;
}

uint32_t File::site_of(const Posting& posting) {
  uint64_t words[(sizeof posting.site + sizeof posting.api) / 8];
  std::memcpy(words, posting.site, sizeof posting.site);
  std::memcpy(words + sizeof posting.site / 8, posting.api, sizeof posting.api);
  uint64_t hash = 0;
  for (uint64_t word : words) hash = mix(hash, word);
  auto [known, is_new] = sites_.try_emplace(hash, uint32_t(sites_.size()));
  if (is_new) {
    auto* slot = reinterpret_cast<SiteSlot*>(next());
    if (!slot) return UINT32_MAX;
    std::memcpy(slot->site, posting.site, sizeof slot->site);
    std::memcpy(slot->api, posting.api, sizeof slot->api);
    publish(slot, Kind::Site);
  }
  return known->second;
}

Event File::begin(const Posting& posting, uint32_t group, uint64_t bytes, int64_t issued_ns,
                  uint8_t flags) {
  Event event;
  std::lock_guard lock(mutex_);
  const uint32_t site = site_of(posting);
  auto* slot = reinterpret_cast<OperationSlot*>(next());
  if (!slot) return lose(), event;
  slot->op = posting.op;
  slot->dtype = posting.dtype;
  slot->reduce = posting.reduce;
  slot->progress = Progress::Waiting;
  slot->ndim = posting.ndim;
  slot->flags = flags;
  slot->group = group;
  slot->site = site;
  slot->root = posting.root;
  slot->tag = posting.tag;
  slot->source = -1;
  slot->part = posting.part;
  slot->parts = posting.parts;
  slot->sequence = posting.sequence;
  slot->bytes = bytes;
  slot->issued_ns = issued_ns;
  slot->posted_ns = posting.posted_ns;
  std::memcpy(slot->shape, posting.shape, sizeof slot->shape);
  publish(slot, Kind::Operation);
  event.slot_ = slot;
  event.window_ = window_;
  return event;
}

Range File::begin_range(const std::string& name) {
  Range range;
  std::lock_guard lock(mutex_);
  auto* slot = reinterpret_cast<RangeSlot*>(next());
  if (!slot) return lose(), range;
  slot->thread = uint32_t(::syscall(SYS_gettid));
  slot->started_ns = now_ns();
  name.copy(slot->name, sizeof slot->name - 1);
  publish(slot, Kind::Range);
  range.slot_ = slot;
  range.window_ = window_;
  return range;
}

std::string File::close() {
  std::lock_guard lock(mutex_);
  if (closed_) return "";
  closed_ = true;
  // Operations that end later are still completed: their pages stay.
  if (reserved_ && ::ftruncate(fd_, off_t(used_)) != 0 && !error_) fail(errno);
  window_.reset();
  if (!error_) return "";
  return "rank " + std::to_string(rank_) + ": " + std::strerror(error_) + "; " +
         std::to_string(lost_) + " operations are not recorded";
}

void start(const std::string& directory) {
  std::lock_guard lock(session()->mutex);
  session()->directory = directory;
  recording.store(++recordings);
}

std::vector<std::string> stop() {
  std::lock_guard lock(session()->mutex);
  recording.store(0);
  std::vector<std::string> losses;
  for (auto& [_, file] : session()->files)
    if (std::string loss = file->close(); !loss.empty()) losses.push_back(loss);
  session()->files.clear();
  return losses;
}

std::shared_ptr<File> file_of(const Roster& roster, int rank) {
  std::lock_guard lock(session()->mutex);
  if (recording.load() == 0) return nullptr;
  auto& file = session()->files[{roster.id(), rank}];
  if (!file) file = std::make_shared<File>(session()->directory, roster, rank);
  return file;
}

Event Tap::record(const Posting& posting, uint64_t bytes, int64_t issued_ns, uint8_t flags) {
  if (const uint32_t now = recording.load(); seen_ != now) {
    seen_ = now;
    file_ = file_of(board_.roster(), board_.world_rank(rank_));
    if (file_) group_ = file_->add_group(board_, rank_);
  }
  return file_ ? file_->begin(posting, group_, bytes, issued_ns, flags) : Event();
}

}  // namespace phalanx::trace
