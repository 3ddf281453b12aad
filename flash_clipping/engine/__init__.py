"""What a user of Opacus meets: the engine, the wrapped module, the optimizer, the criterion and the
loaders. The only folder that knows Opacus, beside the rules for its layers and the diagnostics."""
