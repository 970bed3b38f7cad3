'use strict';
// A tab that is opened again knows the token from before; one that is refused is forgotten.
const KEY = 'agentgym-token';
const known = localStorage.getItem(KEY), refused = new URLSearchParams(location.search).get('token');
if (known && known !== refused) location.replace(`/?token=${encodeURIComponent(known)}${location.hash}`);
else localStorage.removeItem(KEY);
