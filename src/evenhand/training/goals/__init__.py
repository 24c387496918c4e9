"""Goals: whom a run is to serve, the decision that follows, and what every other choice would have given."""
