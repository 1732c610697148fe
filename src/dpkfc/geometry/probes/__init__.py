"""Where the geometry's inputs come from: synthetic, or public by the user's word; private only if named Oracle."""
