"""The web side of the service: HTTP in `api`, what it can do in `services`, `shared` with the worker the rest."""
