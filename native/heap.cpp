#include "heap.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "failure.hpp"
#include "layout.hpp"
#include "process.hpp"

namespace phalanx {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHuge = 2 << 20;
constexpr uint64_t kLeast = 64 << 20;  // that a heap must hold to be of use
constexpr char kMagic[8] = {'P', 'H', 'A', 'L', 'A', 'N', 'X', '1'};

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// In pieces, so that a program with an interval timer gets on: a signal undoes the call it hits.
bool fill(int fd, uint64_t start, uint64_t length) {
  constexpr uint64_t kPiece = 64 << 20;
  for (uint64_t done = 0; done < length; done += kPiece) {
    int result;
    do {
      result = ::fallocate(fd, 0, off_t(start + done), off_t(std::min(kPiece, length - done)));
    } while (result != 0 && errno == EINTR);
    if (result != 0) return false;
  }
  return true;
}

std::string errno_text() { return std::strerror(errno); }

std::string megabytes(uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// Addresses that this process may use in all (RLIMIT_AS), and those that it does.
struct AddressSpace {
  uint64_t limit = UINT64_MAX, used = 0;

  AddressSpace() {
    struct rlimit now{};
    if (::getrlimit(RLIMIT_AS, &now) != 0 || now.rlim_cur == RLIM_INFINITY) return;
    limit = now.rlim_cur;
    if (FILE* file = std::fopen("/proc/self/statm", "re")) {
      unsigned long long pages = 0;
      if (std::fscanf(file, "%llu", &pages) == 1) used = pages * uint64_t(::sysconf(_SC_PAGESIZE));
      std::fclose(file);
    }
  }
  bool is_limited() const { return limit != UINT64_MAX; }
  uint64_t left() const { return limit - std::min(limit, used); }
  // What to add to an error if there is a limit.
  std::string advice() const {
    if (!is_limited()) return "";
    return "; this process may use " + megabytes(limit) + " of addresses (RLIMIT_AS) and uses " +
           megabytes(used) + ": raise the limit (ulimit -v unlimited), or start fewer ranks";
  }
};

// What to do about a call that has failed, where that is not plain from the system's word for it.
std::string advice_for(int code) {
  if (code == EMFILE || code == ENFILE) return "; have more open files allowed (ulimit -n)";
  if (code == ENOSYS || code == EPERM)
    return "; the system denies it: a container's seccomp profile, or a kernel older than 3.17";
  return "";
}

int open_file(const HeapAddress& heap) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", heap.pid, heap.fd);
  return ::open(path, O_RDWR | O_CLOEXEC);
}

}  // namespace

bool HeapHeader::is_valid() const { return std::memcmp(magic, kMagic, sizeof kMagic) == 0; }

uint32_t HeapHeader::list(uint64_t id, Content content, uint64_t offset, uint64_t bytes) {
  uint32_t place = 0;
  while (place < kEntries && entries[place].id != 0) ++place;
  if (place == kEntries) {
    unlisted.fetch_add(1);
    return place;
  }
  entries[place].offset = offset;
  entries[place].bytes = bytes;
  entries[place].content = content;
  entries[place].id = id;
  return place;
}

void HeapHeader::unlist(uint32_t place) {
  if (place < kEntries) entries[place].id = 0;
}

std::shared_ptr<Heap> Heap::mine(int ranks) {
  struct Mine {
    std::mutex mutex;
    std::shared_ptr<Heap> heap;
  };
  // It outlives static destructors. A forked child leaves its parent's heap alone: tensors of the
  // child may still point into it.
  static auto& processes = *new PerProcess<Mine>;
  auto& [mutex, heap] = processes.here();
  std::lock_guard lock(mutex);
  if (!heap) heap.reset(new Heap(ranks));
  return heap;
}

Heap::Heap(std::nullptr_t) {}

// Once the constructor that it calls first is done, the destructor cleans up after what throws.
Heap::Heap(int ranks) : Heap(nullptr) {
  const int fd = address_.fd = ::memfd_create("phalanx-heap", MFD_CLOEXEC);
  if (fd < 0)
    throw Failure(Kind::Memory,
                  "cannot create shared memory: memfd_create: " + errno_text() + advice_for(errno));
  // Reserving address space costs nothing, and more than the machine has memory is never needed.
  // The cap lets hundreds of ranks map each other within 47 bits of addresses.
  uint64_t size = round_up(uint64_t(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE), kHuge);
  size = std::min(size, uint64_t(512) << 30);
  const AddressSpace space;
  if (space.is_limited()) {
    // Every rank maps its own heap twice and all others once. Half of what is left is for them, the
    // other half for what the program has yet to allocate.
    const uint64_t maps = uint64_t(std::max(ranks, 1)) + 1;
    size = std::min(size, space.left() / 2 / maps / kHuge * kHuge);
    if (size < kLeast)
      throw Failure(Kind::Memory, "cannot reserve shared memory for " + std::to_string(ranks) +
                                      " ranks: at least " + megabytes(2 * maps * kLeast) +
                                      " of addresses must be free" + space.advice());
  }
  void* base = MAP_FAILED;
  for (; size >= kLeast; size = round_up(size / 2, kHuge)) {
    if (::ftruncate(fd, off_t(size)) != 0) continue;
    base = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base != MAP_FAILED) break;
  }
  if (base == MAP_FAILED)
    throw Failure(Kind::Memory, "cannot map shared memory: " + errno_text() +
                                    " (is RLIMIT_FSIZE set?)" + space.advice());
  ::madvise(base, size,
            MADV_HUGEPAGE);  // a hint: most systems keep huge pages off for shared memory
  base_ = static_cast<std::byte*>(base);
  address_.pid = ::getpid();
  address_.size = size;
  const ProcessFacts facts = facts_of(address_.pid);
  address_.start_time = facts.start_time;
  address_.stack = facts.stack;
  if (::getrandom(&address_.nonce, sizeof address_.nonce, 0) != ssize_t(sizeof address_.nonce))
    throw Failure(Kind::Backend, "getrandom: " + errno_text());
  free_[0] = size;
  auto* header = reinterpret_cast<HeapHeader*>(allocate(sizeof(HeapHeader)));
  header->layout = kLayout;
  header->address = address_;
  std::memcpy(header->magic, kMagic, sizeof kMagic);
}

Heap::~Heap() {
  if (base_) ::munmap(base_, address_.size);
  if (address_.fd >= 0) ::close(address_.fd);
}

std::byte* Heap::allocate(size_t bytes, bool filled) {
  if (bytes > address_.size) throw_full(bytes);
  uint64_t length = round_up(bytes ? bytes : 1, kPage);
  uint64_t unit = length >= kHuge ? kHuge : kPage;
  std::lock_guard lock(mutex_);
  for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
    uint64_t start = round_up(gap->first, unit), end = gap->first + gap->second;
    if (start + length > end) continue;
    if (filled && !fill(address_.fd, start, length)) {
      int code = errno;
      ::fallocate(address_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(start),
                  off_t(length));
      errno = code;
      throw Failure(Kind::Memory, "cannot allocate " + std::to_string(bytes) +
                                      " bytes of shared memory: " + errno_text());
    }
    uint64_t gap_start = gap->first;
    free_.erase(gap);
    if (start > gap_start) free_[gap_start] = start - gap_start;
    if (start + length < end) free_[start + length] = end - start - length;
    used_[start] = length;
#ifdef MADV_POPULATE_WRITE
    // One call instead of a fault per page.
    if (filled) ::madvise(base_ + start, length, MADV_POPULATE_WRITE);
#endif
    return base_ + start;
  }
  throw_full(bytes);
}

void Heap::throw_full(size_t bytes) const {
  throw Failure(Kind::Memory, "cannot allocate " + std::to_string(bytes) +
                                  " bytes of shared memory: of the " +
                                  std::to_string(address_.size) +
                                  " bytes that are reserved, so many are not free in one piece" +
                                  AddressSpace().advice());
}

void Heap::release(std::byte* block) {
  if (!origin_.is_here()) return;  // a forked child must not punch holes in its parent
  std::lock_guard lock(mutex_);
  auto found = used_.find(offset(block));
  auto [start, length] = *found;
  used_.erase(found);
  ::fallocate(address_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(start), off_t(length));
  auto next = free_.lower_bound(start);
  if (next != free_.end() && start + length == next->first) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == start) {
      previous->second += length;
      return;
    }
  }
  free_[start] = length;
}

bool Heap::contains(const void* data, size_t bytes) const {
  auto* at = static_cast<const std::byte*>(data);
  return at >= base_ && at <= base_ + address_.size && bytes <= size_t(base_ + address_.size - at);
}

size_t Heap::used() const {
  std::lock_guard lock(mutex_);
  size_t total = 0;
  for (auto& [start, length] : used_) total += length;
  return total;
}

std::shared_ptr<HeapView> HeapView::open(const HeapAddress& address, bool show) {
  struct Known {
    std::mutex mutex;
    std::map<std::pair<int32_t, uint64_t>, std::weak_ptr<HeapView>> views;
  };
  static auto& processes = *new PerProcess<Known>;
  auto& [mutex, views] = processes.here();
  std::lock_guard lock(mutex);
  auto& known = views[{address.pid, address.nonce}];
  if (auto view = known.lock()) {
    if (show && view->fd_ < 0) view->fd_ = open_file(address);
    return view;
  }
  int fd = open_file(address);
  if (fd < 0)
    throw Failure(Kind::Backend,
                  "cannot reach the shared memory of process " + std::to_string(address.pid) +
                      ": " + errno_text() +
                      (errno == EMFILE || errno == ENFILE
                           ? advice_for(errno)
                           : " (ranks on one machine must run as one user in one pid namespace)"));
  struct stat info{};
  void* base = MAP_FAILED;
  if (::fstat(fd, &info) == 0 && uint64_t(info.st_size) == address.size &&
      address.size >= sizeof(HeapHeader)) {
    base = ::mmap(nullptr, address.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base == MAP_FAILED) {
      std::string why = errno_text();
      ::close(fd);
      throw Failure(Kind::Memory, "cannot map the shared memory of process " +
                                      std::to_string(address.pid) + " (" + megabytes(address.size) +
                                      "): " + why + AddressSpace().advice());
    }
  }
  if (!show || base == MAP_FAILED) ::close(std::exchange(fd, -1));
  std::shared_ptr<HeapView> view;
  if (base != MAP_FAILED) view.reset(new HeapView(static_cast<std::byte*>(base), address.size, fd));
  if (!view || !view->header().is_valid() || view->header().address.nonce != address.nonce)
    throw Failure(Kind::Backend, "process " + std::to_string(address.pid) +
                                     " is not the peer that was announced (it may have ended)");
  if (view->header().layout != kLayout)
    throw Failure(Kind::Backend, "process " + std::to_string(address.pid) +
                                     " runs another version of Phalanx than this one, process " +
                                     std::to_string(::getpid()));
  ::madvise(base, address.size, MADV_HUGEPAGE);
  std::erase_if(views, [](auto& entry) { return entry.second.expired(); });
  views[{address.pid, address.nonce}] = view;
  return view;
}

std::byte* HeapView::at(uint64_t offset, uint64_t bytes) const {
  if (offset > size_ || bytes > size_ - offset)
    throw Failure(Kind::Backend, std::to_string(bytes) + " bytes at " + std::to_string(offset) +
                                     " are not within the " + std::to_string(size_) +
                                     " bytes of shared memory of process " +
                                     std::to_string(header().address.pid) +
                                     ": what it told of them is damaged");
  return base_ + offset;
}

HeapView::~HeapView() {
  ::munmap(base_, size_);
  if (fd_ >= 0) ::close(fd_);
}

Block Block::shared(size_t bytes, bool filled) {
  auto heap = Heap::mine();
  std::byte* data = heap->allocate(bytes, filled);
  return Block({data, [heap](std::byte* block) { heap->release(block); }}, bytes);
}

Block Block::plain(size_t bytes) {
  // Anonymous memory: zeroed, page aligned, and untouched pages cost nothing.
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED)
    throw Failure(Kind::Memory,
                  "cannot allocate " + std::to_string(bytes) + " bytes: " + errno_text());
  return Block(
      {static_cast<std::byte*>(data), [bytes](std::byte* block) { ::munmap(block, bytes); }},
      bytes);
}

}  // namespace phalanx
