"""Parameters that no kernel serves: followed through the graph of the loss, or by running their module again."""
