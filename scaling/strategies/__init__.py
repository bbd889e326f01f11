"""Parallelism strategies: how arrays are split over a mesh, line by line, forward and backward (Part 5).

For a stack of MLP layers, call `fsdp_tp.forward(params, In, mesh)` and `fsdp_tp.backward(dOut, saved, params, mesh)`,
or the same functions of another strategy. For a Transformer, call `transformer.loss_and_grads(params, tokens, targets,
config, mesh)`. Start reading at `fsdp`, which is one page, and go on in this order:

    one_device, data_parallel, zero, fsdp,
    tensor_parallel, fsdp_tp, pods      the book's listings: one layer's lines, and SPECS, the types of its params
    stack, layers                       any listing over L layers, with prefetched gathers and deferred reductions
    pipeline, stage, channels           layers over pipeline stages, by a schedule of `scaling.schedules`
    context, expert                     attention over a split sequence; experts over an axis
    transformer                         all axes at once
    collective_matmul                   products that overlap with a collective, hop by hop (Part 10)
    stateless                           an nn.Module as a pure function, for strategies of your own
"""
