#include "mailbox.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "report.hpp"

namespace phalanx {
namespace {

constexpr size_t kBuffered = 64 << 10;  // messages up to here are copied at once
constexpr size_t kGulp = 64 << 10;      // moved at a time, so that both ends work together
constexpr size_t kPipesPerPeer = 8;     // messages in pipes that a peer may have yet to read
constexpr size_t kBacklog = 1024;       // small messages a rank may have waiting for free cells

// A pipe with its head fits into a page, holds a buffered message, or streams a long one.
constexpr std::array<size_t, 3> kPipeSizes = {4 << 10, kBuffered + (4 << 10), 512 << 10};

bool is_refused(Pipe::State state) { return state == Pipe::Refused || state == Pipe::Unread; }

// Says that a thread sees to what arrives in a mailbox.
struct Attendance {
  Seat& seat;
  explicit Attendance(Seat& seat) : seat(seat) { ++seat.attending; }
  ~Attendance() { --seat.attending; }
};

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Board> board, int rank, std::string group)
    : board_(std::move(board)),
      rank_(rank),
      group_(std::move(group)),
      spin_(!board_->crowded()),
      pipes_out_(board_->size()),
      sent_(board_->size()),
      received_(board_->size()),
      outbox_(board_->size()) {}

Mailbox::~Mailbox() { close(); }

void Mailbox::close() {
  // Messages whose senders were told that all is well are seen on their way, while somebody is
  // there to take them.
  auto sent = [&] {
    std::lock_guard lock(mutex_);
    if (closing_) return true;
    progress();
    return waiting_out_ == 0;
  };
  wait_until(bell(), spin_, Deadline::in(-1), sent, [&](bool costly) {
    std::lock_guard lock(mutex_);
    inspect(costly);
  });
  std::thread courier;
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    courier.swap(courier_);  // of several that close, one joins
  }
  wake_courier_.notify_all();
  bell().wake();
  if (courier.joinable()) courier.join();
  std::lock_guard lock(mutex_);
  auto drop = [&](auto& open) {
    for (auto& delivery : open) {
      auto kept = delivery->keep;
      std::string why = headline(*delivery) + ": the group was destroyed before it was done";
      // What is on its way may still be read by its receiver.
      if (delivery->state == Delivery::State::Open && !fail(*delivery, Kind::Backend, why))
        board_->park(std::move(kept));
      if (delivery->pipe_block)
        board_->park(std::make_shared<Block>(std::move(delivery->pipe_block)));
    }
    open.clear();
  };

  for (auto& box : outbox_) drop(box);
  count_outbox(-int(waiting_out_));
  drop(streams_out_);
  drop(streams_in_);
  drop(asked_);
  for (Letter& letter : letters_)
    if (letter.pipe) letter.pipe->state.store(Pipe::Unread);
  letters_.clear();
}

std::string Mailbox::headline(const Delivery& delivery) const {
  return describe(delivery).describe() + " on " + board_->title() + ", rank " +
         std::to_string(board_->world_rank(rank_)) + ", at " + delivery.site;
}

Posting Mailbox::describe(const Delivery& delivery) const {
  Posting posting{};
  posting.sequence = delivery.number;
  posting.op = delivery.op;
  posting.dtype = delivery.dtype;
  posting.root = delivery.peer < 0 ? -1 : board_->world_rank(delivery.peer);
  posting.tag = delivery.tag;
  posting.ndim = uint8_t(delivery.ndim);
  std::copy_n(delivery.shape, std::size(delivery.shape), posting.shape);
  posting.bytes = delivery.bytes();
  posting.posted_ns = nanoseconds(delivery.start);
  std::memcpy(posting.site, delivery.site, sizeof posting.site);
  std::memcpy(posting.api, delivery.api, sizeof posting.api);
  return posting;
}

void Mailbox::record(Delivery& delivery) {
  delivery.number = ++recorded_;
  Seat& seat = board_->seat(rank_);
  describe(delivery).show(seat.messages[recorded_ % kHistory]);
  seat.newest_message.store(recorded_, std::memory_order_release);
}

// Show how it ended, unless the record has gone on too far.
void Mailbox::conclude(const Delivery& delivery, Stage stage) {
  Posting& shown = board_->seat(rank_).messages[delivery.number % kHistory];
  if (shown.sequence == delivery.number) shown.reach(stage, now_ns());
}

void Mailbox::count_outbox(int by) {
  waiting_out_ += size_t(by);
  board_->seat(rank_).outbox.store(uint32_t(waiting_out_));
}

void Mailbox::start(const std::shared_ptr<Delivery>& delivery, bool linger) {
  board_->check_usable(phalanx::name(delivery->op));
  size_t bytes = delivery->bytes();
  bool strided = delivery->view.layout != nullptr;
  if (strided) delivery->dense.reset(new std::byte[std::max<size_t>(bytes, 1)]);
  delivery->data = strided ? delivery->dense.get() : delivery->view.data;

  std::lock_guard lock(mutex_);
  if (closing_) throw Failure(Kind::Backend, headline(*delivery) + ": the group is destroyed");
  record(*delivery);
  if (delivery->op == Op::Recv) {
    progress();
    if (!match(*delivery))
      asked_.push_back(delivery);
    else if (delivery->state == Delivery::State::Open)
      streams_in_.push_back(delivery);
  } else {
    if (strided)
      pack(delivery->data, delivery->view.data, *delivery->view.layout, item_size(delivery->dtype));
    if (!outbox_[delivery->peer].empty() || !launch(delivery)) {
      // It cannot go yet: a small message is copied so that its sender can go on.
      if (bytes <= sizeof(Cell::payload) && waiting_out_ < kBacklog) {
        if (!strided && bytes) {
          delivery->dense.reset(new std::byte[bytes]);
          std::memcpy(delivery->dense.get(), delivery->data, bytes);
          delivery->data = delivery->dense.get();
        }
        finish(*delivery);
      }
      outbox_[delivery->peer].push_back(delivery);
      count_outbox(1);
    }
  }
  bool open = delivery->state == Delivery::State::Open;
  if ((linger && open) || (!open && waiting_out_)) {
    if (!courier_.joinable())
      courier_ = std::thread([this] { run_courier(); });
    else
      wake_courier_.notify_all();
  }
}

void Mailbox::open_pipe(Delivery& delivery) {
  size_t bytes = delivery.bytes();
  uint64_t direct = bytes > kBuffered ? board_->share(delivery.data, bytes) : 0;
  size_t kind = 0;
  while (!direct && kind + 1 < kPipeSizes.size() && bytes > kPipeSizes[kind] - sizeof(Pipe)) ++kind;
  auto& spare = spare_pipes_[kind];
  if (spare.empty()) {
    delivery.pipe_block = board_->allocate(kPipeSizes[kind]);
  } else {
    delivery.pipe_block = std::move(spare.back());
    spare.pop_back();
  }
  Pipe* pipe = delivery.pipe = reinterpret_cast<Pipe*>(delivery.pipe_block.data());
  pipe->direct = direct;
  pipe->bytes = bytes;
  pipe->capacity = kPipeSizes[kind] - sizeof(Pipe);
  pipe->filled.store(0, std::memory_order_relaxed);
  pipe->drained.store(0, std::memory_order_relaxed);
  pipe->state.store(Pipe::Open, std::memory_order_relaxed);
  pipe->wanted.store(false, std::memory_order_relaxed);
  ++pipes_out_[delivery.peer];
}

void Mailbox::close_pipe(Delivery& delivery) {
  size_t kind = 0;
  while (kPipeSizes[kind] != delivery.pipe_block.size()) ++kind;
  if (spare_pipes_[kind].size() < kPipesPerPeer)
    spare_pipes_[kind].push_back(std::move(delivery.pipe_block));
  delivery.pipe_block = {};
  --pipes_out_[delivery.peer];
}

// Put a send on its way; false if it must wait for a free cell or a pipe.
bool Mailbox::launch(const std::shared_ptr<Delivery>& delivery) {
  const int peer = delivery->peer;
  uint64_t number = sent_[peer];
  Cell& cell = board_->cells(rank_, peer)[number % kCells];
  // Acquire: the receiver has read the cell's last message before it is overwritten.
  if (cell.turn.load(std::memory_order_acquire) != uint32_t(number / kCells * 2)) return false;
  size_t bytes = delivery->bytes();
  cell.piped = bytes > sizeof(Cell::payload);
  if (cell.piped) {
    if (pipes_out_[peer] == kPipesPerPeer) return false;
    open_pipe(*delivery);
    cell.pipe = board_->share(delivery->pipe, sizeof(Pipe));
  } else if (bytes) {
    std::memcpy(cell.payload, delivery->data, bytes);
  }
  cell.tag = delivery->tag;
  cell.dtype = delivery->dtype;
  cell.count = delivery->view.count;
  delivery->cell = &cell;
  delivery->turn = uint32_t(number / kCells * 2 + 1);
  cell.turn.store(delivery->turn, std::memory_order_release);
  sent_[peer] = number + 1;
  board_->seat(peer).mail.ring();
  if (cell.piped) {
    streams_out_.push_back(delivery);
    pump_out(*delivery);
  } else if (delivery->state == Delivery::State::Open) {
    finish(*delivery);
  }
  return true;
}

// Move a send's bytes into its pipe.
void Mailbox::pump_out(Delivery& delivery) {
  Pipe& pipe = *delivery.pipe;
  const auto state = pipe.state.load(std::memory_order_acquire);
  if (delivery.state == Delivery::State::Open && state == Pipe::Refused) {
    fail(delivery, Kind::Mismatch,
         headline(delivery) + ": the receiver asked for something else and refused the message");
    return;
  }
  if (delivery.state == Delivery::State::Open && state == Pipe::Unread) {
    fail(delivery, Kind::PeerFailed,
         headline(delivery) + ": not received: " + board_->obituary(delivery.peer, true));
    return;
  }
  // Acquire: the receiver has read what is overwritten here. Release: it sees what is written.
  uint64_t drained = pipe.drained.load(std::memory_order_acquire);
  if (pipe.direct) {
    if (drained == pipe.bytes && delivery.state == Delivery::State::Open) finish(delivery);
    return;
  }
  uint64_t filled = pipe.filled.load(std::memory_order_relaxed);
  while (filled < pipe.bytes && filled - drained < pipe.capacity) {
    size_t at = filled % pipe.capacity;
    size_t length =
        std::min({kGulp, size_t(pipe.bytes - filled), size_t(pipe.capacity - (filled - drained)),
                  size_t(pipe.capacity - at)});
    std::memcpy(pipe.data + at, delivery.data + filled, length);
    filled += length;
    pipe.filled.store(filled, std::memory_order_release);
    board_->seat(delivery.peer).mail.ring();
    drained = pipe.drained.load(std::memory_order_acquire);
  }
  if (filled == pipe.bytes && delivery.state == Delivery::State::Open) finish(delivery);
}

// Move a recv's bytes out of its pipe.
void Mailbox::pump_in(Delivery& delivery) {
  Pipe& pipe = *delivery.pipe;
  auto open = Pipe::Open;
  bool abandoned = pipe.direct ? !pipe.state.compare_exchange_strong(open, Pipe::Taking)
                               : pipe.state.load(std::memory_order_acquire) == Pipe::Abandoned;
  if (abandoned && pipe.drained.load(std::memory_order_relaxed) == 0) {
    // As if it had never been sent: the receive goes on waiting.
    pipe.state.store(Pipe::Refused, std::memory_order_release);
    board_->seat(delivery.source).mail.ring();
    delivery.pipe = nullptr;
    delivery.source = -1;
    return;
  }
  if (abandoned) {
    fail(delivery, Kind::PeerFailed,
         headline(delivery) + ": rank " + std::to_string(board_->world_rank(delivery.source)) +
             " gave up sending in the middle of the message; the tensor is partly written");
    return;
  }
  // Once `drained` says that all is read, the pipe is the sender's again: it is not touched after.
  const uint64_t bytes = delivery.bytes(), capacity = pipe.capacity;
  uint64_t drained = pipe.drained.load(std::memory_order_relaxed);
  auto advance = [&](uint64_t length) {
    drained += length;
    pipe.drained.store(drained, std::memory_order_release);
    board_->seat(delivery.source).mail.ring();
  };
  if (pipe.direct) {
    phalanx::copy(delivery.data, board_->reach(delivery.source, pipe.direct), bytes);
    advance(bytes);
  }
  while (drained < bytes) {
    uint64_t filled = pipe.filled.load(std::memory_order_acquire);
    if (drained == filled) break;
    size_t at = drained % capacity;
    size_t length = std::min({kGulp, size_t(filled - drained), size_t(capacity - at)});
    std::memcpy(delivery.data + drained, pipe.data + at, length);
    advance(length);
  }
  if (drained == bytes) finish(delivery);
}

// Take what has arrived from one rank out of its cells.
void Mailbox::collect(int from) {
  for (;;) {
    uint64_t number = received_[from];
    Cell& cell = board_->cells(from, rank_)[number % kCells];
    if (cell.turn.load(std::memory_order_acquire) != uint32_t(number / kCells * 2 + 1)) return;
    Letter letter{from, cell.tag, cell.dtype, cell.count, nullptr, nullptr};
    if (cell.piped) letter.pipe = reinterpret_cast<Pipe*>(board_->reach(from, cell.pipe));
    auto recv = std::find_if(asked_.begin(), asked_.end(), [&](auto& open) {
      return (open->peer < 0 || open->peer == from) && open->tag == letter.tag;
    });
    size_t bytes = letter.count * item_size(letter.dtype);
    if (recv == asked_.end()) {
      if (!letter.pipe && bytes) {
        letter.payload.reset(new std::byte[bytes]);
        std::memcpy(letter.payload.get(), cell.payload, bytes);
      }
      letters_.push_back(std::move(letter));
    } else {
      auto delivery = *recv;
      if (!letter.pipe && letter.count == delivery->view.count && letter.dtype == delivery->dtype) {
        if (bytes) std::memcpy(delivery->data, cell.payload, bytes);
        delivery->source = from;
        finish(*delivery);
      } else {
        accept(*delivery, letter);
        if (delivery->pipe) streams_in_.push_back(delivery);
      }
      if (!still_waits(*delivery)) asked_.erase(recv);
    }
    cell.turn.store(uint32_t(number / kCells * 2 + 2), std::memory_order_release);
    received_[from] = number + 1;
    board_->seat(from).mail.ring();  // it may wait for a free cell
  }
}

// Find a letter for a new recv; true if there was one.
bool Mailbox::match(Delivery& recv) {
  for (;;) {
    auto letter = std::find_if(letters_.begin(), letters_.end(), [&](Letter& letter) {
      return (recv.peer < 0 || recv.peer == letter.from) && recv.tag == letter.tag;
    });
    if (letter == letters_.end()) return false;
    accept(recv, *letter);
    letters_.erase(letter);
    if (!still_waits(recv)) return true;  // else its sender had given up on it
  }
}

void Mailbox::accept(Delivery& recv, Letter& letter) {
  recv.source = letter.from;
  if (letter.dtype != recv.dtype || letter.count != recv.view.count) {
    if (letter.pipe) letter.pipe->state.store(Pipe::Refused, std::memory_order_release);
    board_->seat(letter.from).mail.ring();
    fail(recv, Kind::Mismatch,
         headline(recv) + ": rank " + std::to_string(board_->world_rank(letter.from)) + " sent " +
             phalanx::name(letter.dtype) + "[" + std::to_string(letter.count) +
             "]; nothing was written");
    return;
  }
  recv.pipe = letter.pipe;
  if (letter.pipe) {
    letter.pipe->wanted.store(true);
    pump_in(recv);
  } else {
    if (recv.bytes()) std::memcpy(recv.data, letter.payload.get(), recv.bytes());
    finish(recv);
  }
}

void Mailbox::finish(Delivery& delivery) {
  if (delivery.op == Op::Recv && delivery.view.layout)
    unpack(delivery.view.data, delivery.data, *delivery.view.layout, item_size(delivery.dtype));
  delivery.keep.reset();
  if (delivery.op == Op::Recv) delivery.pipe = nullptr;
  conclude(delivery, Stage::Done);
  delivery.state.store(Delivery::State::Done, std::memory_order_release);
  bell().ring();
}

bool Mailbox::fail(Delivery& delivery, Kind kind, const std::string& why) {
  if (delivery.pipe) {
    auto seen = Pipe::Open;
    delivery.pipe->state.compare_exchange_strong(
        seen, delivery.op == Op::Send ? Pipe::Abandoned : Pipe::Refused);
    if (delivery.op == Op::Send && seen == Pipe::Taking &&
        board_->obituary(delivery.peer, true).empty())
      return false;
    // What the sender has abandoned is refused all the same, so that it gets its pipe back.
    if (delivery.op == Op::Recv) {
      delivery.pipe->state.store(Pipe::Refused);
      delivery.pipe = nullptr;
    }
  }
  conclude(delivery, kind == Kind::Timeout    ? Stage::TimedOut
                     : kind == Kind::Deadlock ? Stage::Deadlock
                     : kind == Kind::Mismatch ? Stage::Mismatch
                                              : Stage::Failed);
  delivery.error = std::make_exception_ptr(Failure(kind, why));
  delivery.keep.reset();
  delivery.state.store(Delivery::State::Failed, std::memory_order_release);
  bell().ring();
  return true;
}

void Mailbox::progress() {
  for (int peer = 0; peer < board_->size(); ++peer) collect(peer);
  for (auto& box : outbox_) {
    while (!box.empty()) {
      auto delivery = box.front();
      if (delivery->state == Delivery::State::Failed) {
        box.pop_front();
        count_outbox(-1);
        continue;
      }
      try {
        if (!launch(delivery)) break;
      } catch (const Failure& failure) {  // no memory for its pipe
        fail(*delivery, failure.kind, failure.what());
      }
      box.pop_front();
      count_outbox(-1);
    }
  }
  for (auto it = streams_in_.begin(); it != streams_in_.end();) {
    pump_in(**it);
    // If its sender has given up, it waits for the next one, before all that ask later.
    if (still_waits(**it) && !match(**it)) asked_.push_front(*it);
    it = (*it)->pipe ? std::next(it) : streams_in_.erase(it);
  }
  for (auto it = streams_out_.begin(); it != streams_out_.end();) {
    Delivery& delivery = **it;
    if (delivery.state != Delivery::State::Failed) pump_out(delivery);
    // The pipe stays until the receiver has read it to the end, or will never do so.
    bool emptied = delivery.pipe->drained.load(std::memory_order_acquire) == delivery.pipe->bytes ||
                   is_refused(delivery.pipe->state.load(std::memory_order_acquire));
    if (emptied && delivery.state != Delivery::State::Open) {
      close_pipe(delivery);
      it = streams_out_.erase(it);
    } else {
      ++it;
    }
  }
}

// Fail what can no longer come to an end.
void Mailbox::inspect(bool costly) {
  std::optional<Failure> broken;
  try {
    board_->check_broken();
  } catch (const Failure& failure) {
    broken = failure;
  }
  std::vector<std::string> ends(board_->size());
  int others_gone = 0;
  for (int peer = 0; peer < board_->size(); ++peer) {
    if (peer != rank_) ends[peer] = board_->obituary(peer, costly);
    others_gone += !ends[peer].empty();
  }
  progress();  // what a peer did before its end still counts

  // Peers that have failed over a deadlock are no news to a rank that is about to learn of it.
  const bool doomed = awaits_verdict(board_->roster(), board_->world_rank(rank_));
  auto judge = [&](Delivery& delivery) {
    if (delivery.state != Delivery::State::Open || doomed) return;
    int peer = delivery.source >= 0 ? delivery.source : delivery.peer;
    if (broken) {
      fail(delivery, broken->kind, headline(delivery) + ": the group is broken: " + broken->what());
    } else if (peer >= 0 && !ends[peer].empty()) {
      fail(delivery, Kind::PeerFailed, headline(delivery) + ": " + ends[peer]);
    } else if (peer < 0 && others_gone > 0 && others_gone == board_->size() - 1) {
      std::string all;
      for (const std::string& end : ends)
        if (!end.empty()) all += "\n  " + end;
      fail(delivery, Kind::PeerFailed, headline(delivery) + ": nobody is left to send" + all);
    } else if (delivery.deadline.passed()) {
      std::vector<int> absent;
      for (int rank = 0; rank < board_->size(); ++rank)
        if (rank == peer || (peer < 0 && rank != rank_)) absent.push_back(rank);
      fail(delivery, Kind::Timeout,
           headline(delivery) + ": reached its timeout of " + seconds_text(delivery.timeout) +
               describe_absent(*board_, absent));
    }
  };
  auto failed = [](auto& delivery) { return delivery->state == Delivery::State::Failed; };
  for (auto* open : {&asked_, &streams_in_, &streams_out_})
    for (auto& delivery : *open) judge(*delivery);
  asked_.remove_if(failed);
  streams_in_.remove_if(failed);
  streams_out_.remove_if([&](auto& delivery) {
    bool lost = !ends[delivery->peer].empty();
    if (lost) close_pipe(*delivery);
    return lost;
  });
  for (auto& box : outbox_) {
    for (auto& delivery : box) judge(*delivery);
    // What its sender believes to be sent has no deadline any more.
    auto erased = std::erase_if(box, [&](auto& delivery) {
      return failed(delivery) || broken || !ends[delivery->peer].empty();
    });
    if (erased) count_outbox(-int(erased));
  }
}

// Whether it takes a new action of the peer to end this delivery: nothing is on its way, and the
// thread that sees to the peer's mailbox, if there is one, has done what it can.
bool Mailbox::only_others_can_end(const Delivery& delivery) const {
  if (ends_by_itself(delivery.timeout, delivery.own_deadline)) return false;
  if (delivery.op == Op::Recv) {
    if (delivery.pipe) return false;
    for (int peer = 0; peer < board_->size(); ++peer) {
      if (delivery.peer >= 0 && delivery.peer != peer) continue;
      uint64_t number = received_[peer];
      const Cell& next = board_->cells(peer, rank_)[number % kCells];
      if (board_->seat(peer).outbox.load() || next.turn.load() == uint32_t(number / kCells * 2 + 1))
        return false;
    }
    return true;
  }
  bool attended = board_->seat(delivery.peer).attending.load() > 0;
  if (!delivery.cell) return pipes_out_[delivery.peer] == kPipesPerPeer || !attended;
  if (delivery.pipe->wanted.load()) return false;
  bool taken_out = delivery.cell->turn.load() != delivery.turn;
  return taken_out || !attended;
}

bool Mailbox::give_up_deadlock(Delivery& delivery, const std::optional<std::string>& verdict) {
  if (!verdict) return false;
  std::lock_guard lock(mutex_);
  progress();
  if (delivery.state == Delivery::State::Open)
    fail(delivery, Kind::Deadlock, headline(delivery) + ": " + *verdict);
  asked_.remove_if([&](auto& open) { return open.get() == &delivery; });
  return true;
}

void Mailbox::wait(Delivery& delivery, const Deadline& patience) {
  auto ready = [&] {
    if (delivery.state.load(std::memory_order_acquire) != Delivery::State::Open) return true;
    std::lock_guard lock(mutex_);
    progress();
    return delivery.state.load(std::memory_order_relaxed) != Delivery::State::Open;
  };
  Attendance attendance(board_->seat(rank_));
  Waiter waiter(board_->roster(), board_->world_rank(rank_));
  const int64_t started = now_ns();
  const Deadline& sooner = patience.at() < delivery.deadline.at() ? patience : delivery.deadline;
  wait_until(bell(), spin_, sooner, ready, [&](bool costly) {
    WaitFacts facts =
        wait_facts(delivery.op, group_, describe(delivery).describe(), delivery.site, started);
    if (give_up_deadlock(delivery, waiter.verdict())) return;
    {
      std::lock_guard lock(mutex_);
      inspect(costly);
      if (delivery.state != Delivery::State::Open) return;
      if (patience.passed())
        throw Failure(Kind::Timeout,
                      headline(delivery) + ": not done when wait() timed out; it goes on");
      if (!costly) return;
      facts.any = delivery.peer < 0;
      for (int peer = 0; peer < board_->size(); ++peer)
        if (peer == delivery.peer || (facts.any && peer != rank_))
          facts.needs.add(board_->world_rank(peer));
      facts.blocked = patience.at() >= delivery.deadline.at() && only_others_can_end(delivery);
    }
    if (!give_up_deadlock(delivery, waiter.update(facts))) check_interrupt();
  });
  if (delivery.state == Delivery::State::Failed) std::rethrow_exception(delivery.error);
}

void Mailbox::cancel(Delivery& delivery) {
  auto gone = [&] {
    std::lock_guard lock(mutex_);
    progress();
    if (delivery.state != Delivery::State::Open) return true;
    if (!fail(delivery, Kind::Backend, headline(delivery) + ": given up")) return false;
    auto given_up = [&](auto& open) { return open.get() == &delivery; };
    asked_.remove_if(given_up);
    streams_in_.remove_if(given_up);
    return true;
  };
  // A receiver that is reading the message is about to be done with it, or dead.
  while (!gone()) std::this_thread::yield();
}

bool Mailbox::idle() const {
  return waiting_out_ == 0 && asked_.empty() && streams_in_.empty() &&
         std::none_of(streams_out_.begin(), streams_out_.end(),
                      [](auto& delivery) { return delivery->state == Delivery::State::Open; });
}

void Mailbox::run_courier() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wake_courier_.wait(lock, [&] { return closing_ || !idle(); });
      if (closing_) return;
    }
    auto at_rest = [&] {
      std::lock_guard lock(mutex_);
      progress();
      return closing_ || idle();
    };
    Spin spin(false);
    Attendance attendance(board_->seat(rank_));
    wait_until(bell(), spin, Deadline::in(-1), at_rest, [&](bool costly) {
      std::lock_guard lock(mutex_);
      inspect(costly);
    });
  }
}

}  // namespace phalanx
