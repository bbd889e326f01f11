"""Models on one device, as pure functions of params, which every mesh must equal; and their files and text.

Call `transformer.init(config)`, `transformer.loss(params, tokens)`, `hf.load(folder)`. Start reading at `transformer`:

    transformer, mlp                 the decoder-only transformer (Part 4), and the book's stack of MLP layers
    layer, latent, moe               a layer's lines, which training on a mesh and serving use as well
    attention, blockwise, tiles      causal attention: by torch's kernel, by einsums, and block by block
    pointwise, rope, dropout, remat  norms and activations, rotary positions, dropout, checkpointing
    leaves, params, inputs           one table of all params; their first values; checks of params and batches
    lora, adapters                   adapters beside frozen weights, and their files
    hf, hf_layout                    folders of Hugging Face
    text, growth, ends               tokenizers, the ones that would never finish, and the tokens that end a text
    template, template_process       chat templates
"""
