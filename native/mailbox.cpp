#include "mailbox.hpp"

#include <algorithm>
#include <cstring>

#include "report.hpp"

namespace phalanx {
namespace {

constexpr size_t kBacklog = 1024;  // small messages a rank may have waiting for free cells

bool is_refused(Pipe::State state) { return state == Pipe::Refused || state == Pipe::Unread; }

// Says that a thread sees to what arrives in a mailbox.
struct Attendance {
  Seat& seat;
  Origin origin;
  explicit Attendance(Seat& seat) : seat(seat) { ++seat.attending; }
  ~Attendance() {
    if (origin.is_here()) --seat.attending;
  }
};

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Board> board, int rank, std::string group)
    : board_(std::move(board)),
      rank_(board_->checked(rank)),
      group_(std::move(group)),
      tap_(*board_, rank),
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
  double patience = 0;
  {
    std::lock_guard lock(mutex_);
    for (auto& box : outbox_)
      for (auto& delivery : box) patience = std::max(patience, delivery->timeout);
  }
  const Deadline deadline = Deadline::in(patience);
  wait_until(
      bell(), spin_, deadline, [&] { return sent() || deadline.passed(); },
      [&](bool costly) {
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
  return describe(delivery).describe() + board_->caption(rank_, delivery.site);
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
  posting.more_shape = delivery.more_shape;
  posting.count = delivery.view.count;
  posting.bytes = delivery.bytes();
  posting.posted_ns = nanoseconds(delivery.start);
  std::memcpy(posting.site, delivery.site, sizeof posting.site);
  std::memcpy(posting.api, delivery.api, sizeof posting.api);
  return posting;
}

void Mailbox::record(Delivery& delivery) {
  delivery.number = ++recorded_;
  Seat& seat = board_->seat(rank_);
  const Posting posting = describe(delivery);
  posting.show(seat.messages[recorded_ % kHistory]);
  delivery.event =
      tap_.begin(posting, delivery.bytes(), 0, uint8_t(delivery.async ? trace::kAsync : 0));
  seat.newest_message.store(recorded_, std::memory_order_release);
}

// Show how it ended, unless the record has gone on too far.
void Mailbox::conclude(Delivery& delivery, Progress how) {
  const int64_t now = now_ns();
  Posting& shown = board_->seat(rank_).messages[delivery.number % kHistory];
  if (shown.sequence == delivery.number) shown.reach(how, now);
  delivery.event.end(how, now, delivery.awaited_ns.load(std::memory_order_relaxed),
                     delivery.source < 0 ? -1 : board_->world_rank(delivery.source));
}

void Mailbox::count_outbox(int by) {
  waiting_out_ += size_t(by);
  board_->seat(rank_).outbox.store(uint32_t(waiting_out_));
}

void Mailbox::start(const std::shared_ptr<Delivery>& delivery, bool linger) {
  board_->check_usable(delivery->op, rank_, delivery->site);
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
    attend(true);
    if (!courier_.joinable())
      courier_ = std::thread([this] { run_courier(); });
    else
      wake_courier_.notify_all();
  }
}

void Mailbox::finish(Delivery& delivery) {
  if (delivery.op == Op::Recv && delivery.view.layout)
    unpack(delivery.view.data, delivery.data, *delivery.view.layout, item_size(delivery.dtype));
  delivery.keep.reset();
  if (delivery.op == Op::Recv) delivery.pipe = nullptr;
  conclude(delivery, Progress::Done);
  delivery.state.store(Delivery::State::Done, std::memory_order_release);
  bell().ring();
}

bool Mailbox::fail(Delivery& delivery, Kind kind, const std::string& why) {
  if (delivery.pipe) {
    auto seen = Pipe::Open;
    delivery.pipe->state.compare_exchange_strong(
        seen, delivery.op == Op::Send ? Pipe::Abandoned : Pipe::Unread);
    if (delivery.op == Op::Send && seen == Pipe::Taking &&
        board_->obituary(delivery.peer, true).empty())
      return false;
    // What the sender has abandoned is refused all the same, so that it gets its pipe back.
    if (delivery.op == Op::Recv) {
      delivery.pipe->state.store(Pipe::Unread);
      delivery.pipe = nullptr;
    }
  }
  conclude(delivery, kind == Kind::Timeout    ? Progress::TimedOut
                     : kind == Kind::Deadlock ? Progress::Deadlock
                     : kind == Kind::Mismatch ? Progress::Mismatch
                                              : Progress::Failed);
  delivery.error = std::make_exception_ptr(Failure(kind, why));
  delivery.keep.reset();
  delivery.state.store(Delivery::State::Failed, std::memory_order_release);
  bell().ring();
  return true;
}

void Mailbox::progress() {
  try {
    advance();
  } catch (const Failure& failure) {
    board_->break_up(failure.kind, failure.what());
  }
}

void Mailbox::advance() {
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
  auto broken = board_->broken_for(Op::Recv);
  std::vector<std::string> ends(board_->size());
  int others_gone = 0;
  for (int peer = 0; peer < board_->size(); ++peer) {
    if (peer != rank_) ends[peer] = board_->obituary(peer, costly);
    others_gone += !ends[peer].empty();
  }
  progress();  // what a peer did before its end still counts

  // Peers that have failed over a deadlock are no news to a rank that is about to learn of it.
  if (awaits_verdict(board_->roster(), board_->world_rank(rank_))) return;
  auto judge = [&](Delivery& delivery) {
    if (delivery.state != Delivery::State::Open) return;
    int peer = delivery.source >= 0 ? delivery.source : delivery.peer;
    if (broken) {
      fail(delivery, broken->kind, headline(delivery) + ": the group is broken: " + broken->what());
    } else if (peer >= 0 && !ends[peer].empty()) {
      fail(delivery, Kind::PeerFailed,
           headline(delivery) + ": " + board_->first_obituary({&peer, 1}, costly));
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
  if (!delivery.cell) return !attended;
  // In this order: whoever takes it out says before that it is wanted, if it is.
  bool taken_out = delivery.cell->turn.load() != delivery.turn;
  return !delivery.pipe->wanted.load() && (taken_out || !attended);
}

bool Mailbox::give_up_deadlock(Delivery& delivery, Waiter& waiter) {
  auto verdict = waiter.verdict();
  if (!verdict) return false;
  std::lock_guard lock(mutex_);
  progress();
  // Another rank of the deadlock may know of it already, and have sent or asked for something.
  if (delivery.state != Delivery::State::Open) return true;
  if ((delivery.pipe && (delivery.op == Op::Recv || delivery.pipe->wanted)) ||
      !fail(delivery, Kind::Deadlock, *verdict)) {
    waiter.drop_verdict();
    return false;
  }
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
  auto look = [&](bool costly) {
    std::lock_guard lock(mutex_);
    inspect(costly);
    if (delivery.state == Delivery::State::Open && patience.passed())
      throw Failure(Kind::Timeout,
                    headline(delivery) + ": not done after a wait of " +
                        seconds_text(double(nanoseconds(patience.at()) - started) * 1e-9) +
                        "; it goes on");
  };
  // What the wait needs, judged now.
  auto judged = [&] {
    WaitFacts facts =
        wait_facts(delivery.op, group_, describe(delivery).describe(), delivery.site, started);
    std::lock_guard lock(mutex_);
    progress();
    facts.any = delivery.peer < 0;
    for (int peer = 0; peer < board_->size(); ++peer)
      if (peer == delivery.peer || (facts.any && peer != rank_ && !board_->seat(peer).left))
        facts.needs.add(board_->world_rank(peer));
    facts.blocked = delivery.state == Delivery::State::Open &&
                    patience.at() >= delivery.deadline.at() && only_others_can_end(delivery);
    return facts;
  };
  wait_until(bell(), spin_, sooner, ready, [&](bool costly) {
    if (give_up_deadlock(delivery, waiter)) return;
    look(costly);
    if (!costly || delivery.state != Delivery::State::Open) return;
    waiter.update(judged());
    if (!give_up_deadlock(delivery, waiter)) check_interrupt();
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

// From when the courier is asked to until it has nothing left to do, not only while it runs: others
// judge by this whether what they sent can still be taken.
void Mailbox::attend(bool attends) {
  if (attends != attends_) board_->seat(rank_).attending += attends ? 1 : -1;
  attends_ = attends;
}

void Mailbox::run_courier() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (idle()) attend(false);
      wake_courier_.wait(lock, [&] { return closing_ || !idle(); });
      attend(!closing_);
      if (closing_) return;
    }
    auto at_rest = [&] {
      std::lock_guard lock(mutex_);
      progress();
      return closing_ || idle();
    };
    Spin spin(false);
    wait_until(bell(), spin, Deadline::in(-1), at_rest, [&](bool costly) {
      std::lock_guard lock(mutex_);
      inspect(costly);
    });
  }
}

}  // namespace phalanx
