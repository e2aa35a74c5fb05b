// Tickets of shared memory, as another rank may have written them. The first byte says how much of
// a right one is left to the input: all, or only where the region lies in this process' heap.
#include <cstdlib>
#include <cstring>

#include "board.hpp"
#include "failure.hpp"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto& roster = *new std::shared_ptr<Roster>(Roster::create(3, false));
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  Ticket ticket;
  try {
    ticket = Ticket::parse(text);
    if (ticket.text() != text) std::abort();
  } catch (const Failure&) {
    if (data[0] % 2) return 0;
  }
  const Ticket right = Ticket::parse(roster->ticket());
  if (data[0] % 2 == 0) {
    ticket = right;
    if (data[0] % 4) ticket.id = 0;
    std::memcpy(&ticket.offset, text.data(), std::min(text.size(), sizeof ticket.offset));
  }
  if (!ticket.threads && ticket.heap.pid != right.heap.pid) return 0;  // leave others alone
  for (bool is_roster : {true, false}) try {
      if (is_roster)
        Roster::open(ticket.text());
      else
        Board::open(roster, {0, 1, 2}, ticket.text(), 0, "");
      if (ticket.text() != right.text() || !is_roster) std::abort();
    } catch (const Failure&) {
    }
  return 0;
}
