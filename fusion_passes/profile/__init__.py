"""What collectives cost on this machine and network: tables, and how they are found."""
