"""The update: an optimizer on values of any placement, and with sharded state."""
