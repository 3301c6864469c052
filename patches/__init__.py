"""The patches: one module each, with a card named PATCH. See ds_gradfix.registry.Patch."""
