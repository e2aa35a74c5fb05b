"""The runs whose results are committed."""

from __future__ import annotations

from pytorch_suite.settings import Settings

RUNS = {
    "backend-2": Settings("backend", 2),
    "backend-3": Settings("backend", 3),
    "backend-4": Settings("backend", 4),
    "as-gloo-3": Settings("as-gloo", 3),
    "as-gloo-4": Settings("as-gloo", 4),
    "as-gloo-4-shim": Settings("as-gloo", 4, shim=True),
    "package-3": Settings("package", 3),
    "package-4-shim": Settings("package", 4, shim=True),
}

# What the default tests run of as-gloo-3 and package-3: quick, and quick to notice.
SLICE = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_product",
    "test_all_reduce_coalesced_max",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_destroy_group",
    "test_gather",
    "test_gather_checks",
    "test_get_backend",
    "test_get_future",
    "test_get_rank_size_group",
    "test_grads_same_across_ranks_with_no_sync",
    "test_irecv",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
    "test_reduce_sum_twice",
    "test_scatter",
    "test_scatter_checks",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]
