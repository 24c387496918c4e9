"""Single private steps and what surrounds them: draws, epochs, epsilon so far, raw losses, callbacks."""
