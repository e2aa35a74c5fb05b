#include "store/file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "store/descriptor.hpp"
#include "store/wire.hpp"

namespace phalanx::store {

// The file, open and locked. Opened anew each time: a lock belongs to what was opened, so this
// excludes other threads and forked children too.
class File::Locked {
 public:
  Locked(const std::string& path, bool exclusive) : path_(path) {
    do {
      file_ = Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
      if (!file_) fail("open");
      while (::flock(file_.fd(), exclusive ? LOCK_EX : LOCK_SH))
        if (errno != EINTR) fail("lock");
      if (::fstat(file_.fd(), &status_)) fail("stat");
    } while (status_.st_nlink == 0);  // removed by its last user while this one waited for the lock
  }

  size_t size() const { return static_cast<size_t>(status_.st_size); }
  ino_t inode() const { return status_.st_ino; }

  std::string read(size_t offset) const {
    std::string bytes(size() - std::min(offset, size()), '\0');
    for (size_t done = 0; done < bytes.size();) {
      ssize_t got = ::pread(file_.fd(), bytes.data() + done, bytes.size() - done,
                            static_cast<off_t>(offset + done));
      if (got < 0 && errno != EINTR) fail("read");
      if (got == 0) bytes.resize(done);
      done += static_cast<size_t>(std::max<ssize_t>(got, 0));
    }
    return bytes;
  }
  void append(size_t offset, const std::string& bytes) {
    // What lies beyond is the unfinished record of a process that died while it wrote.
    if (size() > offset && ::ftruncate(file_.fd(), static_cast<off_t>(offset))) fail("truncate");
    for (size_t done = 0; done < bytes.size();) {
      ssize_t put = ::pwrite(file_.fd(), bytes.data() + done, bytes.size() - done,
                             static_cast<off_t>(offset + done));
      if (put < 0 && errno != EINTR) fail("write");
      done += static_cast<size_t>(std::max<ssize_t>(put, 0));
    }
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw Failure(Kind::Store, std::string("cannot ") + what + " the store's file '" + path_ +
                                   "': " + std::strerror(errno) +
                                   "; every rank needs to be able to write it");
  }

  const std::string& path_;
  Descriptor file_;
  struct stat status_{};
};

File::File(std::string path, int64_t users) : path_(std::move(path)), users_(users) {
  Known& known = known_.here();
  Locked file(path_, true);
  replay(known, file);
  sign(known, file, Op::Join);
}

File::~File() {
  try {
    close();
  } catch (const Failure&) {
    // The file is gone or unreadable: nothing is left to leave.
  }
}

void File::close() {
  if (!origin_.is_here()) return;  // a forked child never joined
  Known& known = known_.here();
  std::lock_guard lock(known.mutex);
  if (std::exchange(closed_, true)) return;
  if (struct stat status; ::stat(path_.c_str(), &status)) return;
  Locked file(path_, true);
  replay(known, file);
  sign(known, file, Op::Leave);
  if (users_ >= 0 && known.left >= users_ && known.left == known.joined) ::unlink(path_.c_str());
}

void File::replay(Known& known, Locked& file) const {
  if (file.inode() != known.inode || file.size() < known.offset) {
    known.table = std::make_unique<Table>();
    known.inode = file.inode();
    known.offset = 0;
    known.joined = known.left = 0;
  }
  if (file.size() == known.offset) return;
  std::string log = file.read(known.offset);
  std::string_view rest = log;
  wire::Length length;
  while (wire::peek(rest, length) && rest.size() - sizeof length >= length) {
    bool sound = true;
    try {
      Request request = wire::decode_request(rest.substr(sizeof length, length));
      if (mutates(request.op)) known.table->attempt(request);
      count(known, request.op);
    } catch (const wire::Malformed&) {
      sound = false;
    } catch (const Failure&) {  // only what was right has been written
      sound = false;
    }
    if (!sound)
      throw Failure(Kind::Store, "'" + path_ + "' is not the file of a phalanx store (at byte " +
                                     std::to_string(known.offset) + "); choose another path");
    rest.remove_prefix(sizeof length + length);
    known.offset += sizeof length + length;
  }
}

void File::append(Known& known, Locked& file, const std::string& bytes) const {
  try {
    file.append(known.offset, bytes);
  } catch (const Failure&) {
    known.inode = 0;  // the table may be ahead of the log: build it again
    throw;
  }
  known.offset += bytes.size();
}

void File::count(Known& known, Op op) {
  known.joined += op == Op::Join;
  known.left += op == Op::Leave;
}

void File::sign(Known& known, Locked& file, Op op) const {
  std::string bytes;
  wire::encode(bytes, Request{op});
  append(known, file, bytes);
  count(known, op);
}

std::optional<Reply> File::attempt(Request& request) {
  Known& known = known_.here();
  std::lock_guard lock(known.mutex);
  Locked file(path_, mutates(request.op));
  replay(known, file);
  std::string bytes;
  if (mutates(request.op)) {
    wire::check_size(request);
    wire::encode(bytes, request);
  }
  const bool arriving = request.op == Op::Barrier && request.values.empty();
  auto reply = known.table->attempt(request);
  // An arrival at a barrier counts although it then waits; all else counts once it is done.
  const bool done = mutates(request.op) && reply && reply->status == Status::Ok;
  if (request.op == Op::Barrier ? arriving : done) append(known, file, bytes);
  return reply;
}

Reply File::run(Request request, const Patience& patience) {
  for (auto pause = 1ms;; pause = std::min(pause * 2, 10ms)) {
    if (auto reply = attempt(request)) return accepted(std::move(*reply), request, patience, "");
    if (patience.exhausted()) {
      Known& known = known_.here();
      std::lock_guard lock(known.mutex);
      return accepted(known.table->cancelled(request), request, patience,
                      " (file '" + path_ + "')");
    }
    std::this_thread::sleep_until(std::min(patience.deadline, Clock::now() + pause));
    if (patience.check) patience.check();
  }
}

}  // namespace phalanx::store
