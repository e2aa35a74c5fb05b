// A store that lives in a file: a log of the requests that changed it, replayed by every user.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "store/table.hpp"

namespace phalanx::store {

// Users on one machine (or a file system with working flock). Each operation opens and locks the
// file, reads what others appended, and appends its own change. The last of `users` to leave
// removes the file; -1: nobody does.
class File : public Store {
 public:
  File(std::string path, int64_t users);
  ~File() override;

  Reply run(Request request, const Patience& patience) override;
  // Stops using the file: once, by whoever is first of close() and the destructor.
  void close();

 private:
  class Locked;

  std::optional<Reply> attempt(Request& request);
  void replay(Locked& file);
  void append(Locked& file, const std::string& bytes);
  void sign(Locked& file, Op op);
  void count(Op op);

  const std::string path_;
  const int64_t users_;
  const pid_t owner_;
  std::mutex mutex_;
  std::unique_ptr<Table> table_;
  ino_t inode_ = 0;
  size_t offset_ = 0;  // of the log, up to which the table knows it
  int64_t joined_ = 0, left_ = 0;
  bool closed_ = false;
};

}  // namespace phalanx::store
