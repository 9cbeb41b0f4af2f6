"""How a rank loads: through the engine's own loader, or by a plan of what that did."""
