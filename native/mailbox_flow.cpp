// How messages move: from outboxes into cells, through pipes, and to the receives that ask for
// them.
#include <algorithm>
#include <cstring>

#include "mailbox.hpp"

namespace phalanx {
namespace {

constexpr size_t kBuffered = 64 << 10;  // messages up to here are copied at once
constexpr size_t kPipesPerPeer = 8;     // large pipes that a peer may have yet to read
constexpr size_t kGulp = 64 << 10;      // moved at a time, so that both ends work together

// A pipe with its head fits into a page, holds a buffered message, or streams a long one.
constexpr std::array<size_t, 3> kPipeSizes = {4 << 10, kBuffered + (4 << 10), 512 << 10};

}  // namespace

void Mailbox::open_pipe(Delivery& delivery) {
  size_t bytes = delivery.bytes();
  uint64_t direct = bytes > kBuffered ? board_->share(delivery.data, bytes) : 0;
  size_t kind = 0;
  // Behind many that are unread, a message flows through a small pipe: there can be any number.
  bool roomy = !direct && pipes_out_[delivery.peer] < kPipesPerPeer;
  while (roomy && kind + 1 < kPipeSizes.size() && bytes > kPipeSizes[kind] - sizeof(Pipe)) ++kind;
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

// Put a send on its way; false if it must wait for a free cell.
bool Mailbox::launch(const std::shared_ptr<Delivery>& delivery) {
  const int peer = delivery->peer;
  uint64_t number = sent_[peer];
  Cell& cell = board_->cells(rank_, peer)[number % kCells];
  // Acquire: the receiver has read the cell's last message before it is overwritten.
  if (cell.turn.load(std::memory_order_acquire) != uint32_t(number / kCells * 2)) return false;
  size_t bytes = delivery->bytes();
  cell.piped = bytes > sizeof(Cell::payload);
  if (cell.piped) {
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
    auto broken = board_->broken();
    std::string why = broken ? broken->what() : board_->obituary(delivery.peer, true);
    if (why.empty())
      why = "rank " + std::to_string(board_->world_rank(delivery.peer)) + " gave up receiving it";
    fail(delivery, broken ? broken->kind : Kind::PeerFailed,
         headline(delivery) + ": not received: " + why);
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
    phalanx::copy(delivery.data, board_->reach(delivery.source, pipe.direct, bytes), bytes);
    advance(bytes);
  }
  while (drained < bytes) {
    uint64_t filled = pipe.filled.load(std::memory_order_acquire);
    if (drained == filled) break;
    size_t at = drained % capacity;
    size_t length =
        std::min({kGulp, size_t(filled - drained), size_t(bytes - drained), size_t(capacity - at)});
    std::memcpy(delivery.data + drained, pipe.data + at, length);
    advance(length);
  }
  if (drained == bytes) finish(delivery);
}

// A pipe of another rank, which has told where it is.
Pipe* Mailbox::pipe_of(int from, uint64_t address) const {
  auto* pipe = reinterpret_cast<Pipe*>(board_->reach(from, address, sizeof(Pipe)));
  const uint64_t capacity = pipe->capacity;
  if (std::none_of(kPipeSizes.begin(), kPipeSizes.end(),
                   [&](size_t size) { return size - sizeof(Pipe) == capacity; }))
    throw Failure(Kind::Backend, "what rank " + std::to_string(board_->world_rank(from)) +
                                     " sent is damaged: there is no such pipe");
  board_->reach(from, address, sizeof(Pipe) + capacity);
  return pipe;
}

// Take what has arrived from one rank out of its cells.
void Mailbox::collect(int from) {
  for (;;) {
    uint64_t number = received_[from];
    Cell& cell = board_->cells(from, rank_)[number % kCells];
    if (cell.turn.load(std::memory_order_acquire) != uint32_t(number / kCells * 2 + 1)) return;
    Letter letter{from, cell.tag, cell.dtype, cell.count, nullptr, nullptr};
    if (cell.piped) {
      letter.pipe = pipe_of(from, cell.pipe);
    } else if (letter.dtype >= DType::Count ||
               letter.count > sizeof cell.payload / item_size(letter.dtype)) {
      throw Failure(Kind::Backend, "what rank " + std::to_string(board_->world_rank(from)) +
                                       " sent is damaged: it does not fit where it is");
    }
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

}  // namespace phalanx
