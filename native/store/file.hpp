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
  // What this process knows of the file; a forked child reads it anew.
  struct Known {
    std::mutex mutex;
    std::unique_ptr<Table> table = std::make_unique<Table>();
    ino_t inode = 0;
    size_t offset = 0;  // of the log, up to which the table knows it
    int64_t joined = 0, left = 0;
  };

  std::optional<Reply> attempt(Request& request);
  void replay(Known& known, Locked& file) const;
  void append(Known& known, Locked& file, const std::string& bytes) const;
  void sign(Known& known, Locked& file, Op op) const;
  static void count(Known& known, Op op);

  const std::string path_;
  const int64_t users_;
  const Origin origin_;
  PerProcess<Known> known_;
  bool closed_ = false;
};

}  // namespace phalanx::store
