// The variant every machine runs: what the compiler targets by default.
#define PHALANX_ISA baseline
#include "kernels_impl.hpp"

namespace phalanx::baseline {
constinit const Table table = make_table("baseline");
}
