"""How the processes of a job are started, isolated, limited and heard."""
