"""What a backward is asked for, and what reaches it."""

from __future__ import annotations

from testing.scenarios.catalog.making import COALESCED, CONCAT, STAYS_LOCAL, on_two

BACKWARDS = [
    on_two(
        "retain-graph",
        "two backwards through one forward",
        "backwards:backward_twice",
        warns=STAYS_LOCAL,
        tested=CONCAT,
        each_torch=True,
        keeps_graph=True,
    ),
    on_two(
        "grad-of-inputs",
        "`autograd.grad` of the inputs with `retain_graph`, then a backward",
        "backwards:grad_of_inputs",
        tested=CONCAT,
    ),
    on_two(
        "gradient-penalty",
        "a loss with gradients in it, of a model that is not compiled",
        "backwards:gradient_penalty",
        tested=CONCAT,
    ),
    on_two(
        "no-sync-elsewhere",
        "`no_sync` around a forward or its backward alone",
        "backwards:no_sync_elsewhere",
        warns=STAYS_LOCAL,
        tested=CONCAT,
        keeps_graph=True,
    ),
    on_two(
        "local-gradients",
        "`no_sync`, then `torch.autograd.grad`",
        "backwards:local_gradients",
        tested=COALESCED,
        each_torch=True,
    ),
    on_two(
        "backward-inputs",
        "`backward(inputs=...)`",
        "backwards:some_inputs",
        tested=COALESCED,
        keeps_graph=True,
    ),
    on_two(
        "loss-reads-parameter",
        "a loss that reads a parameter",
        "backwards:loss_that_reads_a_parameter",
        tested=CONCAT,
    ),
    on_two("flag-unset", "the flag unset while training", "backwards:flag_unset", tested=CONCAT),
    on_two(
        "another-flag", "another flag while training", "backwards:another_flag", tested=COALESCED
    ),
    on_two(
        "kept-tensors",
        "gradients kept in tensors of their own, on some ranks",
        "backwards:kept_gradients",
        tested=COALESCED,
        each_torch=True,
    ),
    on_two(
        "kept-unused",
        "gradients kept with `find_unused_parameters`",
        "backwards:kept_gradients_of_what_may_be_unused",
        tested=CONCAT,
    ),
    on_two(
        "kept-in-graph",
        "gradients kept that belong to a graph of autograd",
        "backwards:kept_in_a_graph",
        tested=CONCAT,
    ),
    on_two(
        "several-outputs",
        "a backward from each of several outputs",
        "backwards:several_outputs",
        tested=CONCAT,
    ),
    on_two(
        "several-outputs-eager",
        "the same after an eager forward, other batch sizes on one rank",
        "backwards:backwards_of_one_round",
    ),
    on_two("failing", "a backward that fails", "backwards:failing", tested=COALESCED),
    on_two(
        "queued-callbacks",
        "callbacks at the end of the backward",
        "backwards:queued_callbacks",
        tested=COALESCED,
        each_torch=True,
    ),
]
