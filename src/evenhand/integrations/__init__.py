"""Other people's trainers: each by its own way in, one file per library, none imported before it is asked for."""
