// The variant every machine runs: what the compiler targets by default.
#define PHALANX_ISA baseline
#define PHALANX_VECTOR 16
#include "kernels_impl.hpp"

namespace phalanx::baseline {
constinit const Table table = make_table("baseline");
}
