"""Train a model by pure steps, `step(params, opt_state, batch) -> (params, opt_state, metrics)`."""
