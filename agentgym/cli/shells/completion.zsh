#compdef agentgym
# Completes commands, options and values in zsh; written by `agentgym completion zsh`.
_agentgym_words() {
  case "$1" in
    "@KEY@") echo "@WORDS@" ;;
  esac
}
_agentgym() {
  local current="${words[CURRENT]}" previous="${words[CURRENT - 1]}" route=agentgym key index
  for ((index = 2; index < CURRENT; index++)); do
    key="$route ${words[index]}"
    [[ "${words[index]}" != -* && -n "$(_agentgym_words "$key -")" ]] || break
    route="$key"
  done
  if [[ "$current" == -*=* ]]; then previous="${current%%=*}"; current="${current#*=}"; compset -P "*="; fi
  key="$route"
  if [[ "$current" == -* ]]; then key="$route -"; elif [[ "$previous" == -* ]]; then key="$route $previous"; fi
  local -a candidates=(${=$(_agentgym_words "$key")})
  if (( $#candidates )); then compadd -- $candidates; else _files; fi
}
if [[ "${funcstack[1]}" == _agentgym ]]; then _agentgym "$@"; else compdef _agentgym agentgym; fi
