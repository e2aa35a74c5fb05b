// Point-to-point messages of one rank of a group: tagged send and recv, any source, messages to
// oneself. Between each two ranks runs a ring of cells; a small message travels in its cell, a
// larger one through a pipe that the cell points to, or straight from the sender's memory where the
// receiver can reach it.
//
// A message of up to 64 KiB is copied at once, so its sender does not wait for the receiver unless
// that is many messages behind.
// Deliveries move on whenever any thread of the rank waits in here; while an asynchronous one is
// open, a courier thread sees to it.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "group.hpp"

namespace phalanx {

class Waiter;

// One send or recv, from its call to its end.
struct Delivery {
  enum class State { Open, Done, Failed };
  // A negative timeout stands for the group's.
  Delivery(Op op, int peer, int tag, DType dtype, View view, double timeout, double group_timeout)
      : op(op),
        peer(peer),
        tag(tag),
        dtype(dtype),
        view(std::move(view)),
        timeout(timeout < 0 ? group_timeout : timeout),
        own_deadline(timeout >= 0),
        start(Clock::now()),
        deadline(Deadline::after(start, this->timeout)) {}
  Op op;
  int peer;  // -1: any source
  int tag;
  DType dtype;
  View view;
  double timeout;
  bool own_deadline;  // not the group's: when it passes, its rank may go on
  Clock::time_point start;
  Deadline deadline;
  int ndim = 1;
  int64_t shape[6] = {};
  uint32_t more_shape = 0;
  char site[80] = {};
  char api[24] = {};
  std::shared_ptr<void> keep;  // what must live until the end

  std::atomic<State> state{State::Open};
  std::exception_ptr error;             // set before state becomes Failed
  int source = -1;                      // of a recv that is done
  bool async = false;                   // its user goes on meanwhile
  std::atomic<int64_t> awaited_ns = 0;  // when its user began to wait for it

  size_t bytes() const { return view.count * item_size(dtype); }

 private:
  friend class Mailbox;
  std::unique_ptr<std::byte[]> dense;  // stands in for a strided view, or keeps a buffered message
  std::byte* data = nullptr;
  Block pipe_block;
  Pipe* pipe = nullptr;
  const Cell* cell = nullptr;  // that a send was put into
  uint32_t turn = 0;           // of the cell then
  uint64_t number = 0;         // in the record of messages
  trace::Event event;
};

// A forked child has not the courier: it leaves its copy alone (see fork.hpp).
class Mailbox {
 public:
  Mailbox(std::shared_ptr<Board> board, int rank, std::string group);
  ~Mailbox();

  // Begin a delivery. If `linger` it will end without anybody waiting for it.
  void start(const std::shared_ptr<Delivery>& delivery, bool linger);
  // Wait for its end, no longer than `patience`; throws what made it fail.
  void wait(Delivery& delivery, const Deadline& patience);
  // End it here and now: its tensor is not touched any more.
  void cancel(Delivery& delivery);
  void close();

 private:
  struct Letter {  // arrived before anybody asked for it
    int from;
    int32_t tag;
    DType dtype;
    uint64_t count;
    Pipe* pipe;
    std::unique_ptr<std::byte[]> payload;
  };
  using Deliveries = std::list<std::shared_ptr<Delivery>>;

  void progress();  // all that can move without waiting; what others have damaged breaks the group
  void advance();
  Pipe* pipe_of(int from, uint64_t address) const;
  bool launch(const std::shared_ptr<Delivery>& delivery);
  void pump_out(Delivery& delivery);
  void pump_in(Delivery& delivery);
  void collect(int from);
  bool match(Delivery& recv);
  // Whether a recv has met no message.
  static bool still_waits(const Delivery& recv) {
    return recv.state == Delivery::State::Open && !recv.pipe;
  }
  void accept(Delivery& recv, Letter& letter);
  void finish(Delivery& delivery);
  // False if it cannot be failed now, because the receiver is reading it.
  bool fail(Delivery& delivery, Kind kind, const std::string& why);
  void inspect(bool costly);
  void record(Delivery& delivery);
  void conclude(Delivery& delivery, Progress how);
  Posting describe(const Delivery& delivery) const;
  bool only_others_can_end(const Delivery& delivery) const;
  bool give_up_deadlock(Delivery& delivery, Waiter& waiter);
  void count_outbox(int by);
  bool idle() const;
  void open_pipe(Delivery& delivery);
  void close_pipe(Delivery& delivery);
  std::string headline(const Delivery& delivery) const;
  void run_courier();
  void attend(bool attends);
  Bell& bell() { return board_->seat(rank_).mail; }

  std::shared_ptr<Board> board_;
  int rank_;
  std::string group_;
  trace::Tap tap_;
  Spin spin_;
  std::mutex mutex_;
  std::condition_variable wake_courier_;
  std::thread courier_;
  bool closing_ = false;
  bool attends_ = false;  // the courier, or it will as soon as it runs

  std::vector<uint32_t> pipes_out_;        // not yet read to the end, per peer
  std::vector<uint64_t> sent_, received_;  // cells used so far, per peer
  std::vector<std::deque<std::shared_ptr<Delivery>>>
      outbox_;                           // sends that have no cell yet, per peer
  size_t waiting_out_ = 0;               // deliveries in all outboxes
  uint64_t recorded_ = 0;                // messages in the record
  Deliveries streams_out_, streams_in_;  // sends and recvs that have a pipe
  Deliveries asked_;                     // recvs that have met no letter
  std::list<Letter> letters_;
  std::array<std::vector<Block>, 3> spare_pipes_;  // by size
};

}  // namespace phalanx
