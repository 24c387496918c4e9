"""One run in several processes: what they say to each other, and one pass over a batch that is divided over them."""
